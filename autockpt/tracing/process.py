"""The tracer's child process as its parent sees it: how it is started, asked, and never left behind.

What runs inside of it is in ``child``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import IO, Any

import torch

from autockpt import errors
from autockpt.callstack import with_room
from autockpt.devices.accelerator import kinds_in_use
from autockpt.errors import GhostError, how_it_ended
from autockpt.schema.workload import WorkloadSpec
from autockpt.signals import fork
from autockpt.tracing.assemble import Source
from autockpt.tracing.child import ALIVE, DONE, FAILED, FORK, READY, Build, Note, serve, wait
from autockpt.tracing.kernels.cuda_kernels import Capability
from autockpt.tracing.run import TracedRun
from autockpt.workload.configs import quiet

_SECONDS_TO_WAKE = 60.0
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
            self.units, self.head, self.outside, self.settings, self.notes, imported = self._receive(READY)
            _imported_by_children.update(dict.fromkeys(imported))
        except BaseException:
            self.close()
            raise

    @classmethod
    def fork(cls, source: Source, prepare: Callable[[TracedRun], None]) -> GhostProcess:
        """A copy of this process in which ``prepare`` sets up the run. Raises NotForkable."""
        if not can_fork():
            raise NotForkable("an accelerator is in use")
        _import_for_children()
        threads = torch.get_num_threads()

        def start(theirs: Connection, note: Note, log: IO[bytes]) -> int:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            with warnings.catch_warnings(action="ignore"):  # of threads: the child is checked before its use
                pid = fork()
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

        return cls(start)

    @classmethod
    def spawn(
        cls, source: Source, spec: WorkloadSpec, device: torch.device, capability: Capability | None = None
    ) -> GhostProcess:
        """A fresh Python process, without accelerators, that builds the workload of ``spec``."""

        def start(theirs: Connection, note: Note, log: IO[bytes]) -> int:
            fds = theirs.fileno(), note.fd, log.fileno()
            program = f"from autockpt.tracing.child import main; main{fds}"
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
            name, message, remedy = content
            raise getattr(errors, name, GhostError)(message, remedy=remedy)
        assert kind == expected, kind
        return tuple(content)

    def _death(self) -> GhostError:
        """What is known about why the child is gone."""
        where = self._note.read()
        tail = self._last_words()
        code = self._life.ended(5.0)
        self._end()
        if code is None:
            return GhostError(f"the tracer's process does not answer any more, {where}")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return GhostError(f"a kernel slipped through and touched ghost memory, {where}")
        if code == -signal.SIGKILL:
            return GhostError(
                f"the tracer's process was killed, {where}; most likely the machine is out of memory",
                remedy="Free memory.",
            )
        return GhostError(f"the tracer's process died ({how_it_ended(code)}), {where}{tail}")

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


def _import_for_children() -> None:
    """What the children before had to import of large libraries is imported here, so that further ones find it."""
    names = [name for name in _imported_by_children if name not in sys.modules]
    if not names:
        return
    with quiet():
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


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
        status = wait(self._pid, seconds)
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
