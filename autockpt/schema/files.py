"""Writing files so that a crash, a full disk or a second process never leaves half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a whole file or nothing: into a temporary file beside it, then moved over it. Raises OSError."""
    path = Path(path)
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


def reason(error: OSError) -> str:
    """What the system says, without errno and path: ``no space left on device``."""
    return (error.strerror or str(error)).lower()


def unwritable(path: Path) -> str:
    """Why no file could be written at ``path``, in words; empty where nothing is known to stand in the way.

    Asks without writing: the nearest folder above that exists must be one in which this user may make files.
    """
    path = Path(path)
    if path.is_dir():
        return "it is a directory"
    try:
        above = next(p for p in path.absolute().parents if p.exists())
        if not above.is_dir():
            return f"{above} is no directory"
        return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} is not yours to write to"
    except OSError as error:
        return reason(error)
