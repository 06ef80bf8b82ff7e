"""One search at a time per directory: a lock that the system releases when its holder dies, however it dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autockpt.errors import RunDirectoryError
from autockpt.schema.files import open_regular, reason, try_lock


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file. Raises RunDirectoryError at once where another process holds it, naming that process."""
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {reason(error)}", remedy="Remove it, or give another folder with --out."
        ) from None
    try:
        if not try_lock(descriptor):
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
