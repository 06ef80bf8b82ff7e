"""Inside the tracer's child process: requests in, raw graphs or errors out, until the parent goes away.

A page that both share says what the child was doing when it died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from autockpt.errors import AutockptError, GhostError
from autockpt.interpreter import with_room
from autockpt.process import wait
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.assemble import Source
from autockpt.tracing.kernels.cuda_kernels import Capability
from autockpt.tracing.run import GhostRun, RecordedRun, TracedRun
from autockpt.workload.failures import summary

_LARGE = "transformers.models."  # take seconds to import
ALIVE, READY, DONE, FAILED, FORK = "alive", "ready", "done", "failed", "fork"
Build = tuple[WorkloadSpec, torch.device, Capability | None]  # what ``TracedRun.build`` is given


def serve(
    connection: Connection, note: Note, source: Source, threads: int, prepare: Callable[[TracedRun], None]
) -> None:
    """Answer requests until the connection ends. Returns to its caller, which must end the process.

    ``source`` says whether steps are ghost-run or recorded, ``threads`` is the parent's number; ``prepare`` builds or
    takes the workload. Replies are (ALIVE,), then (READY, units, head, settings, notes, large modules that it has) or
    (FAILED, error), and for each request (DONE, result) or (FAILED, ...).
    """
    _be_a_child()
    run = _run(source, threads, note)
    try:
        while True:
            # backward must work here: it does not after a fork where the engine has threads for accelerators
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
            connection.send((ALIVE,))
            if not _answer(connection, partial(_prepared, run, prepare)):
                return
            connection, build = _answer_until_forked(connection, run, note)
            run = run if build is None else _run(source, threads, note)
            prepare = partial(_build, build)
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _answer_until_forked(connection: Connection, run: TracedRun, note: Note) -> tuple[Connection, Build | None]:
    """Answer requests; returns in processes that are forked here, with the connection that they go on with.

    Those hold the same workload, as it is after all that was asked so far, or are to build another one.
    """
    forked: list[int] = []
    try:
        while True:
            verb, arguments = connection.recv()
            forked = [pid for pid in forked if wait(pid, 0.0) is None]
            if verb != FORK:
                _answer(connection, lambda v=verb, a=arguments: (DONE, getattr(run, v)(**a)))
                continue
            theirs, page, log = (recv_handle(connection) for _ in range(3))
            pid = os.fork()
            if not pid:
                break
            for descriptor in (theirs, page, log):
                os.close(descriptor)
            forked.append(pid)
            connection.send((DONE, pid))
    finally:
        for pid in forked:
            wait(pid, 0.1)
    connection.close()
    for stream in (1, 2):
        os.dup2(log, stream)
    note.use(page)
    return Connection(theirs), arguments["build"]


def _build(build: Build | None, run: TracedRun) -> None:
    """Build what a run is asked for, if that is not what it holds."""
    if build is not None:
        run.build(*build)


def main(socket: int, note: int) -> None:
    """Entry of a child that was started afresh: the first message is (source, threads, spec, device, capability)."""
    connection = Connection(socket)
    with contextlib.suppress(EOFError, OSError):
        source, threads, *build = connection.recv()
        with_room(lambda: serve(connection, Note(note), source, threads, lambda run: run.build(*build)))
    os._exit(0)


def _run(source: Source, threads: int, note: Note) -> TracedRun:
    if source == "recorded":
        return RecordedRun(torch.device("cpu"))
    return GhostRun(threads=threads, on_op=lambda operator: note.op(operator.note), on_enter=note.place)


def _be_a_child() -> None:
    """Quiet, single-threaded, without accelerators or core dumps, and deaf to Ctrl-C: the parent ends it.

    Nothing is compiled here. Importing bitsandbytes, as PEFT does, would take a second for a compiler otherwise.
    """
    faulthandler.disable()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    gc.freeze()  # what the parent left behind is never looked through
    gc.disable()  # nor what is imported and built: there is one collection before each trace
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _prepared(run: TracedRun, prepare: Callable[[TracedRun], None]) -> tuple[Any, ...]:
    prepare(run)
    gc.collect()
    gc.freeze()  # what is there now stays: collections before each trace only look at what is new
    workload = run.workload
    imported = [name for name in sys.modules if name.startswith(_LARGE)]
    return READY, run.units, run.head, run.outside, workload.settings, workload.notes, imported


def _answer(connection: Connection, work: Callable[[], tuple[Any, ...]]) -> bool:
    """Send the reply to one request; whether it is good news."""
    try:
        reply = work()
    except BaseException as error:
        known = isinstance(error, AutockptError)
        connection.send((FAILED, error if known else GhostError(f"the trace failed: {summary(error)}")))
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()
        return False
    connection.send(reply)
    return True


_OP, _PLACE = 128, 384


class Note:
    """The op and the module that are running, written by the child before each op and readable after its death."""

    def __init__(self, fd: int | None = None) -> None:
        self._file = None
        if fd is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the note
            self._file.truncate(_OP + _PLACE)
            fd = self._file.fileno()
        self.use(fd)

    def use(self, fd: int) -> None:
        """Write to another page from now on."""
        self.fd = fd
        self._page = mmap.mmap(fd, _OP + _PLACE)

    def op(self, name: bytes) -> None:
        """Write the operator's name, padded by the caller to 128 bytes."""
        self._page[: len(name)] = name

    def place(self, path: str) -> None:
        """Write the module's path."""
        self._page[_OP:] = path.encode()[:_PLACE].ljust(_PLACE, b"\0")

    def read(self) -> str:
        """What the note says, in words."""
        op = self._page[:_OP].rstrip(b"\0").decode(errors="replace")
        place = self._page[_OP:].rstrip(b"\0").decode(errors="replace")
        if not op:
            return "before its first op"
        return f"at {op} in {place or 'the model itself'}"

    def close(self) -> None:
        self._page.close()
        if self._file is not None:
            self._file.close()
