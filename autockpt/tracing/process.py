"""The tracer's child process as its parent sees it: how it is started and asked, and what is said of its death.

What runs inside of it is in ``child``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import IO, Any

import torch

from autockpt.devices.accelerator import kinds_in_use
from autockpt.errors import GhostError, how_it_ended
from autockpt.interpreter import with_room
from autockpt.process import Child, ChildDied, ChildSilent, child_environment, last_lines
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.assemble import Source
from autockpt.tracing.child import ALIVE, DONE, FAILED, FORK, READY, Build, Note, serve
from autockpt.tracing.kernels.cuda_kernels import Capability
from autockpt.tracing.run import TracedRun
from autockpt.workload.configs import quiet

_SECONDS_TO_WAKE = 60.0
_imported_by_children: dict[str, None] = {}
Start = Callable[[Note, IO[bytes]], Child]


class NotForkable(Exception):
    """This process cannot be forked safely, or the fork does not work."""


class GhostProcess:
    """A child that holds a ghost workload. ``units``, ``head``, ``settings`` and ``notes`` describe it.

    Its death, whatever the cause, is a GhostError that says at which op. An interrupt while it works ends it.
    """

    def __init__(self, start: Start, first: Any = None) -> None:
        self._note = Note()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.child = start(self._note, self._log)
        try:
            if first is not None:
                self.child.send(first)
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

        def start(note: Note, log: IO[bytes]) -> Child:
            def work(theirs: Connection) -> None:
                for fd in (1, 2):
                    os.dup2(log.fileno(), fd)
                with_room(lambda: serve(theirs, note, source, threads, prepare))

            return Child.fork(work)

        return cls(start)

    @classmethod
    def spawn(
        cls, source: Source, spec: WorkloadSpec, device: torch.device, capability: Capability | None = None
    ) -> GhostProcess:
        """A fresh Python process, without accelerators, that builds the workload of ``spec``."""

        def start(note: Note, log: IO[bytes]) -> Child:
            environment = child_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            return Child.spawn("autockpt.tracing.child", note.fd, log=log, environment=environment)

        return cls(start, (source, torch.get_num_threads(), spec, device, capability))

    def fork_again(self, build: Build | None = None) -> GhostProcess:
        """A process forked from this one, which must have nothing to do: with its workload, or to ``build`` another.

        What this one has imported, built and learnt is there already. Raises NotForkable, or what building raises.
        """

        def start(note: Note, log: IO[bytes]) -> Child:
            def forked(theirs: Connection) -> int:
                self.send(FORK, build=build)
                for descriptor in (theirs.fileno(), note.fd, log.fileno()):
                    send_handle(self.connection, descriptor, self.child.pid)
                return self.receive()

            try:
                return Child(forked, own=False)
            except (AttributeError, OSError) as error:
                raise NotForkable(f"no handle for a process: {error}") from None

        return GhostProcess(start)

    @property
    def connection(self) -> Connection:
        """To wait for several processes at once."""
        return self.child.connection

    def send(self, verb: str, **arguments: Any) -> None:
        """Let the child begin with a GhostRun's method. Raises GhostError where the child died."""
        if self.connection.closed:
            raise GhostError("the tracer's process has ended", remedy="Make a new tracer.")
        try:
            self.child.send((verb, arguments))
        except ChildDied as death:
            raise self._death(death.code) from None

    def receive(self) -> Any:
        """The result of the method. Raises what the method raised, or GhostError where the child died."""
        return self._receive(DONE)[0]

    def close(self) -> None:
        """End the child. Idempotent."""
        self.child.close()
        self._note.close()
        self._log.close()

    def _await_alive(self) -> None:
        try:
            reply = self.child.receive(_SECONDS_TO_WAKE)
        except ChildSilent:
            raise NotForkable("the child does not answer") from None
        except ChildDied:
            raise NotForkable("the child died at once") from None
        if reply[0] != ALIVE:
            raise NotForkable(reply[-1].message)

    def _receive(self, expected: str) -> tuple[Any, ...]:
        try:
            kind, *content = self.child.receive()
        except ChildDied as death:
            raise self._death(death.code) from None
        except BaseException:  # interrupted: the child is in the middle of something
            self.child.close()
            raise
        if kind == FAILED:
            raise content[0]
        assert kind == expected, kind
        return tuple(content)

    def _death(self, code: int | None) -> GhostError:
        """What is known about why the child is gone."""
        where, tail = self._note.read(), last_lines(self._log, 1).strip()
        if code is None:
            return GhostError(f"the tracer's process does not answer any more, {where}")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            return GhostError(f"a kernel slipped through and touched ghost memory, {where}")
        if code == -signal.SIGKILL:
            return GhostError(
                f"the tracer's process was killed, {where}; most likely the machine is out of memory",
                remedy="Free memory.",
            )
        tail = f": {tail}" if tail else ""
        return GhostError(f"the tracer's process died ({how_it_ended(code)}), {where}{tail}")


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
