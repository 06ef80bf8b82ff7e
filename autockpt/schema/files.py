"""Safe files: no crash, full disk or second process leaves one half written, and no link redirects a run's file."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autockpt.errors import AutockptError, without_passwords

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What the system calls a disk or a quota that is full."""


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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            # a path in the text may hold what is no UTF-8 (surrogates)
            file.write(data.encode(errors="replace") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(
    path: Path, text: str, error: type[AutockptError], remedy: str = "Give a path you can write to."
) -> Path:
    """Write a text where a person wants it, and the folders above it. Returns where it lies.

    A link stays, and the file that it leads to is written; a pipe or ``/dev/null`` takes the text. Raises ``error``
    where it cannot be written.
    """
    with writing(path, error, remedy):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            atomic_write(Path(os.path.realpath(path)), text, parents=True)
    return path


@contextmanager
def writing(path: Path, error: type[AutockptError], remedy: str = "Give a path you can write to.") -> Iterator[None]:
    """What goes wrong inside with the file at ``path`` is an ``error``, in words."""
    try:
        yield
    except OSError as why:
        raise error(f"{path} cannot be written: {reason(why)}", remedy=remedy) from None


def set_aside(path: Path) -> Path:
    """Rename an existing file to the first free ``name.1``, ``name.2``, … and return the new path. Raises OSError."""
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, target)
    return target


def open_in_place(path: Path) -> int:
    """A descriptor to read and append to a file of a run, which is made where it is missing.

    Raises OSError for a link in the file's own place, whose target would be overwritten, and for what is no regular
    file; folders above may be links.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    return _regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))


def read_regular(path: Path, most: int = -1) -> bytes:
    """The first ``most`` bytes of a file, or all. Raises OSError for a pipe or a device, which may have no end."""
    with os.fdopen(_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def _regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file, but a directory, a pipe or a device", str(path))


@contextmanager
def locked(descriptor: int, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold an open file against other processes until the block ends, or this process, however it ends.

    While another one holds it, ``busy`` is called with who that is, to wait or to raise. Closes the file.
    """
    try:
        while not _try_lock(descriptor):
            busy(_holder(os.pread(descriptor, 1 << 16, 0)))
        command = without_passwords(" ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]))
        signed = {"host": socket.gethostname(), "process": os.getpid(), "since": time.time(), "command": command}
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(signed).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    import fcntl  # not on Windows, where runs can be read and nothing that locks can run

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks (some network mounts): better unprotected than unusable
        return not isinstance(error, BlockingIOError)
    return True


def _holder(signed: bytes) -> str:
    try:
        read: dict[str, Any] = json.loads(signed)
        since = time.strftime("%H:%M:%S", time.localtime(read["since"]))
        return f"process {read['process']} on {read['host']} since {since} ({read['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


def reason(error: OSError) -> str:
    """What the system says, without errno and path: ``no space left on device``."""
    return (error.strerror or str(error)).lower()


def unwritable(path: Path) -> str:
    """Why no file could be written at ``path``, in words; empty where nothing is known to stand in the way.

    Asks without writing: the nearest folder above that exists must be one in which this user may make files.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        return "it is a directory, not a file"
    above = path if path.exists() else next(p for p in path.parents if p.exists())
    if not path.exists() and not above.is_dir():
        return f"{above} is no directory"
    wanted = os.W_OK if path.exists() else os.W_OK | os.X_OK
    read_only = os.statvfs(above).f_flag & os.ST_RDONLY
    why = "on a file system that is mounted read-only" if read_only else "not yours to write to"
    return "" if os.access(above, wanted) else f"{above} is {why}"
