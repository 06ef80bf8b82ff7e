"""Files: none is left half written by a crash, a full disk or a second process, none of our own is opened through a
link that somebody put in its place, nothing but a file is replaced, and no temporary folder outlives its process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from autockpt.errors import AutockptError

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What the system calls a disk or a quota that is full."""
_LOCK = ".autockpt-lock"


def cache_directory() -> Path:
    """``AUTOCKPT_CACHE``, else ``autockpt`` in the user's cache directory; of who has no home, where nothing can be."""
    if own := os.environ.get("AUTOCKPT_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autockpt"
    except RuntimeError:
        return Path(os.devnull, "autockpt")


def atomic_write(path: Path, data: bytes | str, *, parents: bool = False) -> None:
    """Write a whole file or nothing: into a temporary file next to it, then moved over it. Raises OSError.

    ``parents``: make the folders above it where they are missing.
    """
    path = Path(path)
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_file(
    path: Path,
    text: str,
    error: type[AutockptError],
    remedy: str = "Give a path you can write to.",
    *,
    links: bool = True,
) -> Path:
    """Write a text where a person wants it, and the folders above it. Returns where it lies.

    A stream as ``/dev/stdout`` takes the text as it is. Without ``links`` the file's own place must hold no link, nor
    anything else that is no file. Raises ``error`` where it cannot be written.
    """
    with writing(path, error, remedy):
        if not links and (path.exists() or path.is_symlink()):
            os.close(open_regular(path))
        target = replaced_by(path)
        if target is None:
            _write_stream(path, text)
        else:
            atomic_write(target, text, parents=True)
    return path


def replaced_by(path: Path) -> Path | None:
    """The file that writing to ``path`` replaces, which may not exist yet: links stay, and lead to it.

    None for a stream, into which one writes: a pipe, a device as ``/dev/null``, what this process prints to. Raises
    OSError for what is neither.
    """
    file = Path(os.path.realpath(path)) if path.is_symlink() else path
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return file
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or _own_stream(path) is not None:
        return None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))
    return file


def _own_stream(path: Path) -> int | None:
    """Which of this process's standard output and error a path leads to."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def _write_stream(path: Path, text: str) -> None:
    # what is printed to a file would be lost, were that file opened a second time and emptied
    own = _own_stream(path)
    sys.stdout.flush()
    with open(path if own is None else os.dup(own), "wb") as file:
        file.write(text.encode())


@contextlib.contextmanager
def writing(path: Path, error: type[AutockptError], remedy: str = "Give a path you can write to.") -> Iterator[None]:
    """What goes wrong inside with the file at ``path`` is an ``error``, in words."""
    try:
        yield
    except OSError as why:
        raise error(f"{path} cannot be written: {reason(why)}", remedy=remedy) from None


def _mode_of(path: Path) -> int:
    """The mode of the file that is replaced, else what an ordinary new file gets (mkstemp alone makes 0600)."""
    try:
        return path.stat().st_mode & 0o7777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def set_aside(path: Path) -> Path:
    """Rename an existing file to the first free ``name.1``, ``name.2``, … and return the new path. Raises OSError."""
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, target)
    return target


def open_regular(path: Path, flags: int = os.O_RDONLY, *, links: bool = False) -> int:
    """A descriptor of a regular file, made with O_CREAT among the flags. Raises OSError for anything else.

    A pipe or a device is refused without waiting for its other end. ``links``: the path may be a symbolic link to a
    file, or the end of a pipe that this process was started with (``/dev/stdin``); else a link in the file's own place
    is refused, whatever it points to. Folders above may be links.
    """
    if not links and path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    own_end = links and path.is_fifo() and not os.path.exists(os.path.realpath(path))
    waits_not = 0 if own_end else getattr(os, "O_NONBLOCK", 0)
    follow = 0 if links else getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags | waits_not | follow | getattr(os, "O_BINARY", 0), 0o644)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or own_end:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))


def _kind(mode: int) -> str:
    return "a pipe" if stat.S_ISFIFO(mode) else "a directory" if stat.S_ISDIR(mode) else "a device or socket"


def read_regular(path: Path, most: int = -1, *, links: bool = False) -> bytes:
    """The first ``most`` bytes of a file, or all; see ``open_regular``."""
    with os.fdopen(open_regular(path, links=links), "rb") as file:
        return file.read(most)


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder of this process. What processes that were killed left of theirs is removed first."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        super().__init__(prefix="autockpt-")
        descriptor = os.open(os.path.join(self.name, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
        try_lock(descriptor)  # the system releases it when this process ends, however it does
        weakref.finalize(self, os.close, descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders that no process holds any more; anything odd is left alone."""
    for folder in parent.glob("autockpt-*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if (folder / _LOCK).exists():
                descriptor = open_regular(folder / _LOCK, os.O_RDWR)
                try:
                    if try_lock(descriptor):
                        shutil.rmtree(folder)
                finally:
                    os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file without waiting; False where another process holds it. Closing it releases the lock."""
    import fcntl  # not on Windows, where runs can be read and nothing that locks can run

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks (some network mounts): better unprotected than unusable
        return True
    return True


def reason(error: OSError) -> str:
    """What the system says, without errno and path: ``no space left on device``."""
    return (error.strerror or str(error)).lower()


def unwritable(path: Path) -> str:
    """Why no file could be written at ``path``, in words; empty where nothing is known to stand in the way.

    Asks without writing: the nearest folder above that exists must be one in which this user may make files.
    """
    try:
        target = replaced_by(Path(path))
        if target is None:
            return "" if os.access(path, os.W_OK) else "it is not yours to write to"
        above = next(p for p in target.absolute().parents if p.exists())
        if not above.is_dir():
            return f"{above} is no directory"
        return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} is not yours to write to"
    except OSError as error:
        return reason(error)
