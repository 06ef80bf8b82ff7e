"""Offload from an accelerator into a file, by a thread of its own and through a little pinned memory.

The thread does everything in the order in which it was asked: copy a part of a storage to the host, write it while the
next part comes, and the same backwards. So what is read was written before, a place in the file that is used again is
not overwritten while somebody still reads it, and pinned memory never holds more than two parts. The file is read and
written past the page cache where its file system allows that (O_DIRECT): the bytes shall not fill the host's memory by
another way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from autockpt.devices.hostpool import HostUse, Piece, Pool, file_area, whole_pages
from autockpt.devices.scratch import no_room, scratch_folder, unnamed_file
from autockpt.devices.streams import AcceleratorQueues

PART_BYTES = 16 << 20  # what is copied and written at a time; two of them are on the host at once
_PAGE = mmap.PAGESIZE


def staging_bytes(limit: int | None) -> int:
    """Pinned host memory that the disk tier takes: two parts, at most a quarter of a host budget of ``limit`` bytes."""
    return 2 * (PART_BYTES if limit is None else min(PART_BYTES, max(_PAGE, limit // 8 // _PAGE * _PAGE)))


class FileRoom:
    """A part of an open file, from ``start`` on. Slices are parts of it; the file is closed with the last of them."""

    def __init__(self, file: IO[bytes], folder: str, start: int = 0) -> None:
        self.file, self.folder, self.start = file, folder, start

    def __getitem__(self, index: slice) -> FileRoom:
        return FileRoom(self.file, self.folder, self.start + index.start)

    def move(self, way: Any, memory: torch.Tensor, part: slice) -> None:
        """Write the beginning of ``memory`` to a part of the room, or read it from there, in whole pages.

        ``way``: ``os.pwrite``, or what reads likewise. Raises MeasurementError.
        """
        length = whole_pages(part.stop - part.start)
        try:
            _all_of(way, self.file, memory[:length], self.start + part.start)
        except OSError as error:
            raise no_room(length, self.folder, error) from None


class DiskTransport:
    """Copies beside compute into a file that has no name, in ``folder`` (default: ``scratch.scratch_folder``).

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
        self._staging: list[_Staging] = []
        self._thread = ThreadPoolExecutor(1, "autockpt-disk")

    def send(self, source: torch.Tensor) -> DiskParcel:
        """Start moving ``source`` (1-D uint8) into the file. Raises MeasurementError where the disk is full or the
        folder cannot be written."""
        if not self._staging:
            memory, half = self.queues.host_memory(self._staging_bytes), self._staging_bytes // 2
            self._staging = [_Staging(memory[:half]), _Staging(memory[half : 2 * half])]
        return DiskParcel(self, source)

    def drain(self) -> None:
        """Return when all that was asked for so far has been written and read."""
        self._thread.submit(lambda: None).result()

    def run(self, job: Any) -> Future[None]:
        """Give the thread one more job; ``job(staging)``."""
        return self._thread.submit(job, self._staging)

    def _file(self, nbytes: int) -> FileRoom:
        file = unnamed_file(nbytes, self.folder)
        with contextlib.suppress(OSError, AttributeError):  # file systems in memory have no direct way
            flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT)
        return FileRoom(file, self.folder)


class _Staging:
    """One part's worth of pinned memory. ``busy``: event of the last copy that read from it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.busy: Any = None


class DiskParcel:
    """Bytes on their way through the thread."""

    _source: torch.Tensor | None = None
    _out: _Out | None = None
    _in: _In | None = None
    _piece: Piece[FileRoom] | None = None

    def __init__(self, transport: DiskTransport, source: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._transport, self._queues = transport, transport.queues
        # whole pages, for O_DIRECT
        self._piece = transport.space.take(whole_pages(self.nbytes))
        self._source = source
        self._out = _Out(transport, source, self._piece.memory)
        self._written = transport.run(self._out)

    def settle(self) -> None:
        if self._source is not None:
            assert self._out is not None
            self._out.left.result()  # no copy reads from the source any more, on no queue
            self._source = self._out = None

    def fetch(self) -> None:
        if self._source is None and self._in is None:
            assert self._piece is not None
            self._in = _In(self._transport, self.nbytes, self._piece.memory)

    def get(self) -> torch.Tensor:
        if self._source is not None:
            return self._source
        self.fetch()
        self._written.result()  # an error in writing is an error here, whatever was read
        job = self._in
        assert job is not None and job.buffer is not None
        job.read.result()
        self._queues.wait(job.arrived)
        job.waited = True
        self._queues.use(job.buffer)
        return job.buffer

    def release(self) -> None:
        if self._in is not None:
            self._in.let_go()
            self._in = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._out is not None:
                self._out.cancelled = True
            self.release()
            if self._piece is not None:
                # whoever gets this place writes by the same thread, after what was asked for so far
                self._transport.space.give(self._piece)


class _Out:
    """Write a storage to the file. Holds the source until the last copy from it has ended.

    ``left`` is done then, or tells what went wrong; the writing of the last parts goes on.
    """

    def __init__(self, transport: DiskTransport, source: torch.Tensor, room: FileRoom) -> None:
        self._queues, self._room = transport.queues, room
        self._ready = self._queues.mark()
        self.source: torch.Tensor | None = source
        self.left: Future[None] = Future()
        self.cancelled = False

    def __call__(self, staging: list[_Staging]) -> None:
        try:
            self._move(staging)
        except BaseException as error:
            error.__traceback__ = None  # its frames hold the source
            if not self.left.done():
                self.left.set_exception(error)
            raise
        finally:
            self.source = None

    def _move(self, staging: list[_Staging]) -> None:
        source = self.source
        assert source is not None
        waiting: tuple[torch.Tensor, slice] | None = None
        for turn, part in enumerate(_parts(source.numel(), staging)):
            if self.cancelled:
                break
            half = staging[turn % 2]
            _free(half, self._queues)
            target = half.memory[: part.stop - part.start]
            event = self._queues.copy("out", target, source[part], [self._ready])
            try:
                if waiting is not None:  # while this part is on its way
                    self._room.move(os.pwrite, *waiting)
            finally:
                self._queues.finish(event)
            waiting = half.memory, part
        self.source = source = None
        self.left.set_result(None)
        if waiting is not None and not self.cancelled:
            self._room.move(os.pwrite, *waiting)


class _In:
    """Read a storage back from the file into a new device buffer, which belongs to the queue that asked for it.

    The job is done (``read``) when all copies to the buffer have been queued; ``arrived`` is the event of the last.
    """

    arrived: Any = None

    def __init__(self, transport: DiskTransport, nbytes: int, room: FileRoom) -> None:
        self._queues, self._room = transport.queues, room
        self.buffer: torch.Tensor | None = self._queues.device_memory(nbytes)
        self._ready = self._queues.mark()
        self.waited = self.cancelled = self._queued = False
        self.read = transport.run(self)

    def __call__(self, staging: list[_Staging]) -> None:
        buffer, event = self.buffer, None
        if buffer is None:
            return
        try:
            for turn, part in enumerate(_parts(buffer.numel(), staging)):
                if self.cancelled:
                    break
                half = staging[turn % 2]
                _free(half, self._queues)
                self._room.move(_pread, half.memory, part)
                source = half.memory[: part.stop - part.start]
                event = half.busy = self._queues.copy("in", buffer[part], source, [self._ready])
            self.arrived, self._queued = event, True
        finally:
            # whoever cancels looks at `_queued` after that, and this looks at `cancelled` after `_queued`: one of the
            # two sees that a copy may still be on its way to a buffer which nobody waits for
            if event is not None and (self.cancelled or not self._queued):
                self._queues.finish(event)

    def let_go(self) -> None:
        """Nobody wants the buffer any more."""
        self.cancelled = True
        if self._queued and not self.waited and self.buffer is not None:
            self._queues.record_stream(self.buffer, "in")
        self.buffer = None


def _parts(nbytes: int, staging: list[_Staging]) -> Iterator[slice]:
    size = len(staging[0].memory)
    return (slice(start, min(start + size, nbytes)) for start in range(0, nbytes, size))


def _free(half: _Staging, queues: AcceleratorQueues) -> None:
    """Wait until the copy that reads from this memory has ended."""
    if half.busy is not None:
        queues.finish(half.busy)
        half.busy = None


def _pread(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _all_of(move: Any, file: IO[bytes], memory: torch.Tensor, offset: int) -> None:
    """Read or write all of ``memory``, in as many calls as that takes. Raises OSError."""
    buffer: Any = memory.numpy()
    view = memoryview(buffer)
    while view:
        try:
            done = move(file.fileno(), view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(file):
                raise
            continue
        if not done:
            raise OSError(errno.EIO, "the file ends too early")
        view, offset = view[done:], offset + done


def _leave_direct(file: IO[bytes]) -> bool:
    """Go by way of the page cache from now on, where the file system wants an alignment of its own."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    if not flags & direct:
        return False
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags & ~direct)
    return True
