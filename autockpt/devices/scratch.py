"""Disk space for offloaded activations: files without a name, claimed before anything is written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from autockpt.errors import MeasurementError

FOLDER = "AUTOCKPT_OFFLOAD_DIR"


def scratch_folder() -> str:
    """``AUTOCKPT_OFFLOAD_DIR``, else ``TMPDIR``, else ``/var/tmp``: ``/tmp`` is memory on many systems."""
    if own := os.environ.get(FOLDER):
        return own
    chosen = os.environ.get("TMPDIR") or "/var/tmp"
    return chosen if os.access(chosen, os.W_OK) else tempfile.gettempdir()


def unnamed_file(nbytes: int, folder: str | Path) -> IO[bytes]:
    """An open file of that size, which has no name from the start: nothing is left behind however the process ends.

    Raises MeasurementError where the folder cannot be written or its disk is full.
    """
    try:
        file = tempfile.TemporaryFile(dir=folder, prefix="autockpt-", buffering=0)  # noqa: SIM115  the caller closes it
        try:
            reserve(file.fileno(), nbytes, str(folder))
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise no_room(nbytes, folder, error) from None
    return file


def no_room(nbytes: int, folder: str | Path, error: OSError) -> MeasurementError:
    """The error for activations that the folder cannot take."""
    return MeasurementError(
        f"cannot keep {nbytes / 2**20:.0f} MiB of offloaded activations in {folder}: {error.strerror or error}",
        remedy=f"Free space there, set {FOLDER} (or TMPDIR) to a directory on a larger disk that you can write to, or "
        "offload fewer units.",
    )


def reserve(fd: int, nbytes: int, folder: str) -> None:
    """Claim the disk space now: writing to a mapping whose disk is full would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    if shutil.disk_usage(folder).free < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, nbytes)
