"""The tracer's child process: what runs inside of it, and how the parent starts it, asks it and never leaves it behind.

Inside: requests in, raw graphs or errors out, until the parent goes away. A page that both share says what the child
was doing when it died.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any

import torch

from autockpt import errors
from autockpt.callstack import with_room
from autockpt.devices.accelerator import kinds_in_use
from autockpt.errors import AutockptError, GhostError
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.assemble import Source
from autockpt.tracing.cuda_kernels import Capability
from autockpt.tracing.run import GhostRun, RecordedRun, TracedRun
from autockpt.workload.configs import quiet
from autockpt.workload.failures import summary

ALIVE, READY, DONE, FAILED = "alive", "ready", "done", "failed"
FORK = "fork"
Build = tuple[WorkloadSpec, torch.device, Capability | None]  # what ``TracedRun.build`` is given


def serve(
    connection: Connection, note: Note, source: Source, threads: int, prepare: Callable[[TracedRun], None]
) -> None:
    """Answer requests until the connection ends. Returns to its caller, which must end the process.

    ``source`` says whether steps are ghost-run or recorded, ``threads`` is the parent's number; ``prepare`` builds or
    takes the workload. Replies are (ALIVE,), then (READY, units, head, settings, notes, modules imported for it) or
    (FAILED, error class, message, remedy), and for each request (DONE, result) or (FAILED, ...).
    """
    known = set(sys.modules)
    _be_a_child()
    run = _run(source, threads, note)
    try:
        while _is_ready(connection, run, prepare, known):
            connection, build = _answer_until_forked(connection, run, note)
            if build is None:
                prepare = _as_it_is
            else:
                run, prepare = _run(source, threads, note), partial(_build, build)
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _is_ready(connection: Connection, run: TracedRun, prepare: Callable[[TracedRun], None], known: set[str]) -> bool:
    _check_autograd()
    connection.send((ALIVE,))
    return _answer(connection, lambda: _prepared(run, prepare, known))


def _answer_until_forked(connection: Connection, run: TracedRun, note: Note) -> tuple[Connection, Build | None]:
    """Answer requests; returns in processes that are forked here, with the connection that they go on with.

    Those hold the same workload, as it is after all that was asked so far, or are to build another one.
    """
    forked: list[int] = []
    try:
        while True:
            verb, arguments = connection.recv()
            forked = [pid for pid in forked if _wait(pid, 0.0) is None]
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
            _wait(pid, 0.1)
    connection.close()
    for stream in (1, 2):
        os.dup2(log, stream)
    note.use(page)
    return Connection(theirs), arguments["build"]


def _as_it_is(run: TracedRun) -> None:
    """The run has its workload."""


def _build(build: Build, run: TracedRun) -> None:
    run.build(*build)


def main(socket: int, note: int, log: int) -> None:
    """Entry of a child that was started afresh: the first message is a pickled (source, threads, spec, device,
    capability)."""
    for stream in (1, 2):
        os.dup2(log, stream)
    connection = Connection(socket)
    with contextlib.suppress(EOFError, OSError):
        source, threads, spec, device, capability = pickle.loads(connection.recv_bytes())
        with_room(
            lambda: serve(connection, Note(note), source, threads, lambda run: run.build(spec, device, capability))
        )
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
    gc.freeze()  # what the parent left behind is not looked through at every collection
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _check_autograd() -> None:
    """Backward must work here: it does not after a fork where the engine has threads for accelerators."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()


def _prepared(run: TracedRun, prepare: Callable[[TracedRun], None], known: set[str]) -> tuple[Any, ...]:
    prepare(run)
    gc.collect()
    gc.freeze()  # what is there now stays: collections before each trace only look at what is new
    gc.disable()  # and there is one before each trace
    workload = run.workload
    imported = [name for name in sys.modules if name not in known]
    return READY, run.units, run.head, workload.settings, workload.notes, imported


def _answer(connection: Connection, work: Callable[[], tuple[Any, ...]]) -> bool:
    """Send the reply to one request; whether it is good news."""
    try:
        reply = work()
    except BaseException as error:
        connection.send((FAILED, *_described(error)))
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()
        return False
    connection.send(reply)
    return True


def _described(error: BaseException) -> tuple[str, str, str]:
    if isinstance(error, AutockptError):
        return type(error).__name__, error.message, error.remedy
    return "GhostError", f"the trace failed: {summary(error)}", "Record a real step instead."


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


_SECONDS_TO_WAKE = 60.0
_REMEDY = "Record a real step instead."
_LARGE = "transformers.models."  # take seconds to import
_imported_by_children: dict[str, None] = {}
_open_ends: weakref.WeakSet[Connection] = weakref.WeakSet()


class NotForkable(Exception):
    """This process cannot be forked safely, or the fork does not work."""


class GhostProcess:
    """A child that holds a ghost workload. ``units``, ``head``, ``settings`` and ``notes`` describe it.

    Its death, whatever the cause, is a GhostError that says at which op. An interrupt while it works ends it.
    """

    def __init__(
        self,
        start: Callable[[Connection, Note, IO[bytes]], int],
        first: bytes | None = None,
        *,
        own: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._note = Note()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.connection, theirs = Pipe()
        _open_ends.add(self.connection)
        try:
            self._pid = start(theirs, self._note, self._log)
            self._life = _Life(self._pid, own)
        finally:
            theirs.close()
        self._end = weakref.finalize(self, _end, os.getpid(), self._life, self.connection)
        try:
            if first is not None:
                self.connection.send_bytes(first)
            if meanwhile is not None:
                meanwhile()
            self._await_alive()
            self.units, self.head, self.settings, self.notes, imported = self._receive(READY)
            _imported_by_children.update(dict.fromkeys(n for n in imported if n.startswith(_LARGE)))
        except BaseException:
            self.close()
            raise

    @classmethod
    def fork(
        cls, source: Source, prepare: Callable[[TracedRun], None], meanwhile: Callable[[], None] | None = None
    ) -> GhostProcess:
        """A copy of this process in which ``prepare`` sets up the run, while this one does ``meanwhile``.

        Raises NotForkable.
        """
        if not can_fork():
            raise NotForkable("an accelerator is in use")
        _import_for_children()
        threads = torch.get_num_threads()

        def start(theirs: Connection, note: Note, log: IO[bytes]) -> int:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # forking with threads: the child is checked before it is used
                pid = os.fork()
            if pid:
                return pid
            try:
                for fd in (1, 2):
                    os.dup2(log.fileno(), fd)
                for connection in list(_open_ends):
                    connection.close()
                with_room(lambda: serve(theirs, note, source, threads, prepare))
            finally:
                os._exit(0)

        return cls(start, meanwhile=meanwhile)

    @classmethod
    def spawn(
        cls, source: Source, spec: WorkloadSpec, device: torch.device, capability: Capability | None = None
    ) -> GhostProcess:
        """A fresh Python process, without accelerators, that builds the workload of ``spec``."""

        def start(theirs: Connection, note: Note, log: IO[bytes]) -> int:
            fds = theirs.fileno(), note.fd, log.fileno()
            program = f"from autockpt.tracing.process import main; main{fds}"
            paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
            environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=fds, env=environment, stdin=subprocess.DEVNULL
            )
            process.returncode = 0  # reaped by _end, not by subprocess
            return process.pid

        return cls(start, pickle.dumps((source, torch.get_num_threads(), spec, device, capability)))

    def fork_again(self, build: Build | None = None, meanwhile: Callable[[], None] | None = None) -> GhostProcess:
        """A process forked from this one, which must have nothing to do: with its workload, or to ``build`` another.

        What this one has imported, built and learnt is there already. ``meanwhile`` is done while it builds. Raises
        NotForkable, or what building raises.
        """

        def start(theirs: Connection, note: Note, log: IO[bytes]) -> int:
            self.send(FORK, build=build)
            for descriptor in (theirs.fileno(), note.fd, log.fileno()):
                send_handle(self.connection, descriptor, self._pid)
            return self.receive()

        return GhostProcess(start, own=False, meanwhile=meanwhile)

    def send(self, verb: str, **arguments: Any) -> None:
        """Let the child begin with a GhostRun's method. Raises GhostError where the child died."""
        if self.connection.closed:
            raise GhostError("the tracer's process has ended", remedy="Make a new tracer.")
        try:
            self.connection.send((verb, arguments))
        except (OSError, ValueError):
            raise self._death() from None

    def receive(self) -> Any:
        """The result of the method. Raises what the method raised, or GhostError where the child died."""
        return self._receive(DONE)[0]

    def close(self) -> None:
        """End the child. Idempotent."""
        self._end()
        self._note.close()
        self._log.close()

    def _await_alive(self) -> None:
        if not self.connection.poll(_SECONDS_TO_WAKE):
            raise NotForkable("the child does not answer")
        try:
            reply = self.connection.recv()
        except (EOFError, OSError):
            raise NotForkable("the child died at once") from None
        if reply[0] != ALIVE:
            raise NotForkable(str(reply[-2]))

    def _receive(self, expected: str) -> tuple[Any, ...]:
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        except BaseException:  # interrupted: the child is in the middle of something
            self._end()
            raise
        if kind == FAILED:
            raise _error(*content)
        assert kind == expected, kind
        return tuple(content)

    def _death(self) -> GhostError:
        """What is known about why the child is gone."""
        where = self._note.read()
        tail = self._last_words()
        code = self._life.ended(5.0)
        self._end()
        if code is None:
            return GhostError(f"the tracer's process does not answer any more, {where}", remedy=_REMEDY)
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return GhostError(f"a kernel slipped through and touched ghost memory, {where}", remedy=_REMEDY)
        if code == -signal.SIGKILL:
            return GhostError(
                f"the tracer's process was killed, {where}; most likely the machine is out of memory",
                remedy="Free memory, or record a real step instead.",
            )
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return GhostError(f"the tracer's process died ({how}), {where}{tail}", remedy=_REMEDY)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(size - 500, 0))
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            return f": {lines[-1]}" if lines else ""
        return ""


def can_fork() -> bool:
    """Whether a forked child may use torch: on Linux, as long as no accelerator is in use."""
    return sys.platform == "linux" and not kinds_in_use()


def _error(name: str, message: str, remedy: str) -> AutockptError:
    kind = getattr(errors, name, GhostError)
    return kind(message, remedy=remedy)


def _import_for_children() -> None:
    """What the children before had to import of large libraries is imported here, so that further ones find it."""
    names = [name for name in _imported_by_children if name not in sys.modules]
    if not names:
        return
    with quiet():
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _wait(pid: int, seconds: float) -> int | None:
    """The exit status of a child that is about to end; None where it does not within the time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


class _Life:
    """Whether a process still runs: one that this process forked itself (``own``), or that a child of it did.

    Raises NotForkable where the system has no handles for processes of others.
    """

    def __init__(self, pid: int, own: bool) -> None:
        self._pid, self._handle = pid, None
        if not own:
            try:
                self._handle = os.pidfd_open(pid)
            except (AttributeError, OSError) as error:
                raise NotForkable(f"no handle for a process: {error}") from None
            weakref.finalize(self, os.close, self._handle)

    def ended(self, seconds: float) -> int | None:
        """Its exit code (0 for another's child), negative for a signal; None where it does not end within the time."""
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            return 0 if poll.poll(seconds * 1000) else None
        status = _wait(self._pid, seconds)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is None:
                os.kill(self._pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _end(owner: int, life: _Life, connection: Connection) -> None:
    """Close the connection, which ends an idle child; kill it where that is not enough."""
    if os.getpid() != owner:
        return  # a fork of the owner: the child is not ours
    connection.close()
    if life.ended(0.2) is None:
        life.kill()
        life.ended(5.0)
