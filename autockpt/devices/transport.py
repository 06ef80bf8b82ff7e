"""Offload's ways off a device: pinned host memory for CUDA, a memory-mapped file where the device is the CPU itself."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch

from autockpt.devices.base import Transport
from autockpt.devices.hostpool import AREA_BYTES, Piece, Pool
from autockpt.devices.streams import CudaQueues, StreamTransport
from autockpt.errors import MeasurementError


def transport_for(device: torch.device | str) -> Transport:
    """A new transport for one device. Raises MeasurementError for a kind of device that has none."""
    device = torch.device(device)
    if device.type == "cpu":
        return CpuTransport()
    if device.type == "cuda":
        return StreamTransport(CudaQueues(device))
    raise MeasurementError(
        f"nothing is known about moving activations off a {device.type} device",
        remedy="Use plans without offload there.",
    )


class CpuTransport:
    """Activations in a file, mapped into memory: the kernel writes it out when memory runs short.

    ``directory`` defaults to ``TMPDIR`` where that is set, else ``/var/tmp``: ``/tmp`` is memory on many systems. The
    file has no name from the start, so nothing is left behind however the process ends. Mapped bytes are not counted
    by the CPU allocator's meter.
    """

    copy_queues = False

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = str(directory or _scratch_directory())
        # each area holds a file descriptor, of which there are few: grow in large steps
        self.pool = Pool(self._map, lambda nbytes, held: max(AREA_BYTES, 4 * nbytes, held // 4))

    def send(self, source: torch.Tensor) -> CpuParcel:
        """Copy ``source`` (1-D uint8) to the file. Raises MeasurementError where the disk is full."""
        piece = self.pool.take(source.numel())
        piece.memory.copy_(source)
        return CpuParcel(self.pool, piece, source)

    def _map(self, nbytes: int) -> torch.Tensor:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with tempfile.TemporaryFile(dir=self.directory, prefix="autockpt-") as file:
                _reserve(file.fileno(), nbytes, self.directory)
                return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        except OSError as error:
            raise MeasurementError(
                f"cannot keep {nbytes / 2**20:.0f} MiB of offloaded activations in {self.directory}: {error.strerror}",
                remedy="Free space there, set TMPDIR to a directory on a larger disk, or offload fewer units.",
            ) from None


def _scratch_directory() -> str:
    chosen = os.environ.get("TMPDIR") or "/var/tmp"
    return chosen if os.access(chosen, os.W_OK) else tempfile.gettempdir()


def _reserve(fd: int, nbytes: int, directory: str) -> None:
    """Claim the disk space now: writing to a mapping whose disk is full would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    if shutil.disk_usage(directory).free < nbytes:
        raise OSError(errno.ENOSPC, "No space left on device")
    os.ftruncate(fd, nbytes)


class CpuParcel:
    """Bytes in the mapped file. Copies take place in ``send`` and ``get``; there is nothing to prefetch."""

    def __init__(self, pool: Pool, piece: Piece, source: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._pool, self._piece = pool, piece
        self._source: torch.Tensor | None = source
        self._back: torch.Tensor | None = None

    def settle(self) -> None:
        self._source = None

    def fetch(self) -> None:
        pass

    def get(self) -> torch.Tensor:
        if self._source is not None:
            return self._source
        if self._back is None:
            self._back = torch.empty(self.nbytes, dtype=torch.uint8)
            self._back.copy_(self._piece.memory)
        return self._back

    def release(self) -> None:
        self._back = None

    def __del__(self) -> None:
        self._pool.give(self._piece)
