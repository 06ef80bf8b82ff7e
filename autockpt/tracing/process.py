"""The tracer's child process: it holds a ghost workload and answers requests, so that its crashes harm no other
process.

The parent's side comes first, then the child's. Requests go in, graphs or errors come out, until the parent closes the
connection. Where the child dies of a signal, its log ends with the Python calls that it died in (faulthandler).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any

import torch

from autockpt.devices.accelerator import kinds_in_use
from autockpt.errors import AutockptError, GhostError, how_it_ended
from autockpt.interpreter import with_room
from autockpt.process import Child, ChildDied, ChildSilent, be_killed_first, child_environment, last_lines, wait
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.assemble import GraphSource
from autockpt.tracing.kernels.cuda_kernels import Capability
from autockpt.tracing.traced_run import FirstCycle, GhostRun, RecordedRun, TracedRun
from autockpt.workload.failures import crash_site, summary

_SECONDS_TO_WAKE = 60.0
_ALIVE, _DONE, _FAILED = "alive", "done", "failed"
TRACE, _FORK = "trace", "fork"
Build = tuple[WorkloadSpec, torch.device, Capability | None]  # what ``TracedRun.build`` is given
Prepare = Callable[[TracedRun], None]


class NotForkable(Exception):
    """This process cannot be forked safely, or the fork does not work."""


def can_fork() -> bool:
    """Whether a forked child may use torch: on Linux, as long as no accelerator is in use."""
    return sys.platform == "linux" and not kinds_in_use()


class GhostProcess:
    """A child that holds a ghost workload; ``first_cycle`` describes it.

    Its death, whatever the cause, is a GhostError. An interrupt while it works ends it.
    ``start`` starts it with its log, ``first`` is the first message to one that was not forked.
    """

    def __init__(self, start: Callable[[IO[bytes]], Child], first: Any = None) -> None:
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  lives as long as the process
        self.child = start(self._log)
        try:
            if first is not None:
                self.child.send(first)
            self._await_alive()
            self.first_cycle: FirstCycle = self.receive()
        except BaseException:
            self.close()
            raise

    @classmethod
    def fork(cls, source: GraphSource, prepare: Prepare) -> GhostProcess:
        """A copy of this process in which ``prepare`` sets up the run. Raises NotForkable."""
        if not can_fork():
            raise NotForkable("an accelerator is in use")
        threads = torch.get_num_threads()

        def start(log: IO[bytes]) -> Child:
            def work(theirs: Connection) -> None:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
                with_room(lambda: _serve(theirs, source, threads, prepare))

            return Child.fork(work)

        return cls(start)

    @classmethod
    def spawn(cls, source: GraphSource, build: Build) -> GhostProcess:
        """A fresh Python process, without accelerators, that builds a workload."""
        environment = child_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return cls(
            lambda log: Child.spawn("autockpt.tracing.process", log=log, environment=environment),
            (source, torch.get_num_threads(), build),
        )

    def fork_again(self, build: Build | None = None) -> GhostProcess:
        """A process forked from this one, which must have nothing to do: with its workload, or to ``build`` another.

        What this one has imported, built and learned is there already. Raises NotForkable, or what building raises.
        """

        def start(log: IO[bytes]) -> Child:
            def forked(theirs: Connection) -> int:
                self.send(_FORK, build)
                for descriptor in (theirs.fileno(), log.fileno()):
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

    def send(self, verb: str, asked: Any) -> None:
        """Let the child begin to trace a plan, or to fork. Raises GhostError where the child died."""
        if self.connection.closed:
            raise GhostError("the tracer's process has ended", remedy="Make a new tracer.")
        try:
            self.child.send((verb, asked))
        except ChildDied as death:
            raise self._death(death.code) from None

    def receive(self) -> Any:
        """What the child answers. Raises what it raised, or GhostError where it died."""
        try:
            kind, content = self.child.receive()
        except ChildDied as death:
            raise self._death(death.code) from None
        except BaseException:  # interrupted: the child is in the middle of something
            self.child.close()
            raise
        if kind == _FAILED:
            raise content
        return content

    def close(self) -> None:
        """End the child. Idempotent."""
        self.child.close()
        self._log.close()

    def _await_alive(self) -> None:
        try:
            kind, content = self.child.receive(_SECONDS_TO_WAKE)
        except ChildSilent:
            raise NotForkable("the child does not answer") from None
        except ChildDied:
            raise NotForkable("the child died at once") from None
        if kind != _ALIVE:
            raise NotForkable(content.message)

    def _death(self, code: int | None) -> GhostError:
        """What is known about why the child is gone."""
        if code is None:
            return GhostError("the tracer's process does not answer any more")
        if code in (-signal.SIGSEGV, -signal.SIGBUS):
            place = crash_site(last_lines(self._log, 200))
            return GhostError(f"a kernel slipped through and touched ghost memory{place and f' at {place}'}")
        if code == -signal.SIGKILL:
            return GhostError(
                "the tracer's process was killed; most likely the machine is out of memory",
                remedy="Free memory, or use a smaller configuration or batch of the same model.",
            )
        log, _, _ = last_lines(self._log, 200).partition("Fatal Python error")  # faulthandler's, below the reason
        tail = next(reversed(log.strip().splitlines()), "")
        return GhostError(f"the tracer's process died ({how_it_ended(code)}){tail and ': '}{tail}")


# Inside the child.


def main(socket: int) -> None:
    """Entry of a child that was started afresh: the first message is (source, threads, Build)."""
    connection = Connection(socket)
    with contextlib.suppress(EOFError, OSError):
        source, threads, build = connection.recv()
        with_room(lambda: _serve(connection, source, threads, partial(_build, build)))
    os._exit(0)


def _serve(connection: Connection, source: GraphSource, threads: int, prepare: Prepare | None) -> None:
    """Answer requests until the connection ends. Returns to its caller, which must end the process.

    ``source`` says whether steps are ghost-run or recorded, ``threads`` is the parent's number; ``prepare`` builds or
    takes the workload. Replies are (ALIVE, None), then (DONE, FirstCycle) or (FAILED, error), and for each request
    (DONE, result) or (FAILED, error).
    """
    _be_a_child()
    run = _new_run(source, threads)
    try:
        while True:
            # backward must work here: it does not after a fork where the engine has threads for accelerators
            with torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
            connection.send((_ALIVE, None))
            if not _answer(connection, partial(_prepared, run, prepare)):
                return
            connection, build = _answer_until_forked(connection, run)
            prepare = None
            if build is not None:
                run, prepare = _new_run(source, threads), partial(_build, build)
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _answer_until_forked(connection: Connection, run: TracedRun) -> tuple[Connection, Build | None]:
    """Answer requests; returns in processes that are forked here, with the connection that they go on with.

    Those hold the same workload, as it is after all that was asked so far, or are to build another one.
    """
    forked: list[int] = []
    try:
        while True:
            verb, asked = connection.recv()
            forked = [pid for pid in forked if wait(pid, 0.0) is None]
            if verb != _FORK:
                _answer(connection, partial(run.trace, asked))
                continue
            theirs, log = (recv_handle(connection) for _ in range(2))
            pid = os.fork()
            if not pid:
                break
            os.close(theirs)
            os.close(log)
            forked.append(pid)
            connection.send((_DONE, pid))
    finally:
        for pid in forked:
            wait(pid, 0.1)
    connection.close()
    for stream in (1, 2):
        os.dup2(log, stream)
    return Connection(theirs), asked


def _be_a_child() -> None:
    """Quiet, single-threaded, without accelerators or core dumps, and deaf to Ctrl-C: the parent ends it.

    Nothing is compiled here. Importing bitsandbytes, as PEFT does, would take a second for a compiler otherwise.
    """
    faulthandler.enable(2, all_threads=False)  # to the log
    be_killed_first()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    gc.freeze()  # what the parent left behind is never looked through
    gc.disable()  # nor what is imported and built: there is one collection before each trace
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115


def _build(build: Build, run: TracedRun) -> None:
    run.build(*build)


def _prepared(run: TracedRun, prepare: Prepare | None) -> FirstCycle:
    if prepare is not None:
        prepare(run)
    gc.collect()
    gc.freeze()  # what is there now stays: collections before each trace only look at what is new
    return run.first_cycle


def _answer(connection: Connection, work: Callable[[], Any]) -> bool:
    """Send the reply to one request; whether it is good news."""
    try:
        reply = _DONE, work()
    except BaseException as error:
        known = isinstance(error, AutockptError)
        connection.send((_FAILED, error if known else GhostError(f"the trace failed: {summary(error)}")))
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()
        return False
    connection.send(reply)
    return True


def _new_run(source: GraphSource, threads: int) -> TracedRun:
    if source == "recorded":
        return RecordedRun(torch.device("cpu"))
    return GhostRun(threads=threads)
