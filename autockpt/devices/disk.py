"""Offload into files that have no name: mapped into memory where nothing runs alongside compute, else by a thread.

The thread does everything in the order in which it was asked: copy a part of a storage to pinned memory, wait, write
it, and the same backwards. So what is read was written before, a place in the file that is used again is not
overwritten while somebody still reads it, and there is never more than one part in pinned memory. The file is read and
written past the page cache where its file system allows that (O_DIRECT): the bytes shall not fill the host's memory by
another way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from autockpt.devices.base import OffloadHandle
from autockpt.devices.hostpool import HostUse, Piece, Pool, file_area, whole_pages
from autockpt.devices.streams import AcceleratorQueues, Direction
from autockpt.errors import MeasurementError

PART_BYTES = 32 << 20  # what is copied and written at a time
_PAGE = mmap.PAGESIZE
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
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix="autockpt-", buffering=0))
            reserve(file.fileno(), nbytes, str(folder))
            stack.pop_all()  # the caller closes it
    except OSError as error:
        raise no_room(nbytes, folder, error) from None
    return file


def no_room(nbytes: int, folder: str | Path, error: OSError) -> MeasurementError:
    """The error for activations that the folder cannot take."""
    return MeasurementError(
        f"cannot keep {nbytes / 2**20:.0f} MiB of offloaded activations in {folder}: {error.strerror or error}",
        remedy=f"Free space there, set {FOLDER} (or TMPDIR) to a directory on a larger disk that you can write to, or "
        "offload fewer units (a search: --choices without offload).",
    )


def reserve(fd: int, nbytes: int, folder: str) -> None:
    """Claim the disk space now: writing to a mapping whose disk is full would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    if shutil.disk_usage(folder).free < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, nbytes)


class CpuTransport:
    """Activations in a file, mapped into memory: the kernel writes it out when memory runs short. Copies take place at
    once, so it serves every device without streams.

    ``directory`` defaults to ``scratch_folder``. Mapped bytes are not counted by the CPU allocator's meter; ``use`` is
    told of them.
    """

    copy_queues = False

    def __init__(self, directory: str | Path | None = None, use: HostUse | None = None) -> None:
        self.directory = str(directory or scratch_folder())
        self.pool = Pool(self._map, file_area, use)

    def send(self, source: torch.Tensor) -> CpuHandle:
        """Copy ``source`` (1-D uint8) to the file. Raises MeasurementError where the disk is full, or the file would
        be over the host budget."""
        piece = self.pool.take(source.numel())
        piece.memory.copy_(source.cpu())  # by way of ordinary memory: no device's copies need know mapped files
        return CpuHandle(self.pool, piece, source)

    def _map(self, nbytes: int) -> torch.Tensor:
        with unnamed_file(nbytes, self.directory) as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


class CpuHandle(OffloadHandle):
    """Bytes in the mapped file. Copies take place in ``send`` and ``get``."""

    def __init__(self, pool: Pool[torch.Tensor], piece: Piece[torch.Tensor], source: torch.Tensor) -> None:
        super().__init__(source)
        self._pool, self._piece, self._device = pool, piece, source.device

    def _bring_back(self) -> torch.Tensor:
        back = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        return back.copy_(self._piece.memory).to(self._device)

    def __del__(self) -> None:
        self._pool.give(self._piece)


class FileRoom:
    """A part of an open file, from ``start`` on. Slices are parts of it; the file is closed with the last of them."""

    def __init__(self, file: IO[bytes], folder: str, start: int = 0) -> None:
        self.file, self.folder, self.start = file, folder, start

    def __getitem__(self, index: slice) -> FileRoom:
        return FileRoom(self.file, self.folder, self.start + index.start)

    def move(self, way: Any, memory: torch.Tensor, part: slice) -> None:
        """Write the beginning of ``memory`` to a part of the room, or read it from there, in whole pages.

        ``way``: ``os.pwritev`` or ``os.preadv``. Raises MeasurementError.
        """
        length, offset = whole_pages(part.stop - part.start), self.start + part.start
        buffer: Any = memory[:length].numpy()
        view = memoryview(buffer)
        try:
            while view:
                if not (done := way(self.file.fileno(), [view], offset)):
                    raise OSError(errno.EIO, "the file ends too early")
                view, offset = view[done:], offset + done
        except OSError as error:
            raise no_room(length, self.folder, error) from None


def staging_bytes(limit: int | None) -> int:
    """Pinned host memory that the disk tier takes: a part, at most a quarter of a host budget of ``limit`` bytes."""
    return PART_BYTES if limit is None else min(PART_BYTES, max(_PAGE, limit // 4 // _PAGE * _PAGE))


class DiskTransport:
    """Copies alongside compute into a file in ``folder`` (default: ``scratch_folder``).

    What it takes of the host budget it claims when it is made. Raises HostBudgetExceeded where that is too much.
    """

    copy_queues = True

    def __init__(self, queues: AcceleratorQueues, folder: str | Path | None = None, use: HostUse | None = None) -> None:
        self.folder = str(folder or scratch_folder())
        self.queues = queues
        self.space: Pool[FileRoom] = Pool(self._file, file_area, align=_PAGE)
        use = use or HostUse()
        self._staging_bytes = staging_bytes(use.limit)
        use.claim(use.fitting(self._staging_bytes, self._staging_bytes))
        self._staging = torch.empty(0, dtype=torch.uint8)
        self.thread = ThreadPoolExecutor(1, "autockpt-disk")

    def send(self, source: torch.Tensor) -> DiskHandle:
        """Start moving ``source`` (1-D uint8) into the file. Raises MeasurementError where the disk is full or the
        folder cannot be written."""
        if not len(self._staging):
            self._staging = self.queues.host_memory(self._staging_bytes)[: self._staging_bytes]
        return DiskHandle(self, source)

    def move(self, direction: Direction, tensor: torch.Tensor, room: FileRoom) -> Future[None]:
        """Let the thread write all of a tensor to the file and then let go of it, or fill it from there."""
        return self.thread.submit(self._move, direction, [tensor], room, self.queues.mark())

    def _move(self, direction: Direction, tensors: list[torch.Tensor], room: FileRoom, ready: Any) -> None:
        tensor = tensors.pop()  # what the thread remembers of a job that is done must not hold the device's memory
        size = len(self._staging)
        for start in range(0, len(tensor), size):
            part = slice(start, min(start + size, len(tensor)))
            staging = self._staging[: part.stop - part.start]
            if direction == "out":
                self.queues.finish(self.queues.copy("out", staging, tensor[part], [ready]))
                room.move(os.pwritev, self._staging, part)
            else:
                room.move(os.preadv, self._staging, part)
                self.queues.finish(self.queues.copy("in", tensor[part], staging, [ready]))

    def _file(self, nbytes: int) -> FileRoom:
        file = unnamed_file(nbytes, self.folder)
        aligned = self._staging.data_ptr() % _PAGE == 0
        with contextlib.suppress(OSError, AttributeError):  # file systems in memory have no direct way
            flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT * aligned)
        return FileRoom(file, self.folder)


class DiskHandle(OffloadHandle):
    """Bytes on their way through the thread. Copies have ended when a job has, so no compute queue waits for them."""

    def __init__(self, transport: DiskTransport, source: torch.Tensor) -> None:
        super().__init__(source)
        self._transport = transport
        self._piece = transport.space.take(whole_pages(self.nbytes))  # for O_DIRECT
        self._written = transport.move("out", source, self._piece.memory)

    def _wait_until_left(self) -> None:
        self._written.result()

    def _bring_back(self) -> torch.Tensor:
        back = self._transport.queues.device_memory(self.nbytes)
        self._read = self._transport.move("in", back, self._piece.memory)
        return back

    def _wait_until_back(self, back: torch.Tensor) -> None:
        self._read.result()
        self._transport.queues.use(back)

    def release(self) -> None:
        if self._back is not None:
            self._read.cancel()
        super().release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of a handle that could not be made
            self._written.cancel()
            self.release()
            # whoever gets this place writes by the same thread, after what was asked for so far
            self._transport.space.give(self._piece)
