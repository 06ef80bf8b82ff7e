"""One search at a time per directory: a lock that the system releases when its holder dies, however it dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autockpt.errors import RunDirectoryError
from autockpt.schema.files import reason


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file. Raises RunDirectoryError at once where another process holds it, naming that process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunDirectoryError(
            f"{path.parent} cannot be written: {reason(error)}", remedy="Give another folder with --out."
        ) from None
    try:
        if not _acquire(descriptor):
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "?"
            raise RunDirectoryError(
                f"another search (process {holder}) is at work in {path.parent}",
                remedy="Wait for it or stop it; or ask in another folder with --out.",
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)  # releases the lock, too


def _acquire(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows locks byte ranges: take one far behind the process number, which stays readable
        import msvcrt

        os.lseek(descriptor, 1 << 20, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks (some network mounts): better unprotected than unusable
        return True
    return True
