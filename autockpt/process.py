"""Child processes that measure, ghost-run or calibrate: each has one connection, and none outlives its parent.

A child may crash or hang; its parent reports why and continues. A child is ended by ``close``, when nothing refers to
it any more, and when the interpreter exits. The last functions are about the processes of a job that torchrun started.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import site
import socket
import struct
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

from autockpt.interpreter import fork

T = TypeVar("T")
_LOOK_SECONDS = 1.0  # between two looks whether a silent child lives
_IDLE, _ENDING = 0.2, 10.0  # seconds that a child gets to end by itself, and to be gone once it is killed
_ANSWER = 60.0  # seconds that a fork has for an answer
_TAIL = 1 << 16  # bytes of a log that are read from its end
_open_ends: weakref.WeakSet[Connection] = weakref.WeakSet()


class ChildDied(Exception):
    """The child is gone. ``code`` as in subprocess: negative for a signal; None where it did not end by itself."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class ChildSilent(Exception):
    """The child sent, or accepted, nothing within the time limit; it has been killed."""


class Child:
    """A process, and a connection to it that takes whatever can be pickled.

    ``start`` starts it with the child's end of the connection and returns its pid. ``own``: it is this process's child,
    not one of its children's. ``leads`` its own process group: all of that is killed with it, at once; others get a
    moment to end when their connection does. Raises what ``start`` raises, OSError without handles for a process of
    others.
    """

    def __init__(self, start: Callable[[Connection], int], *, own: bool = True, leads: bool = False) -> None:
        self.connection, theirs = Pipe()
        _open_ends.add(self.connection)
        try:
            self.pid = start(theirs)
            self._life = _Life(self.pid, own, leads)
        finally:
            theirs.close()
        self._end = weakref.finalize(self, _end, os.getpid(), self._life, self.connection)

    @classmethod
    def spawn(cls, module: str, *descriptors: int, log: IO[bytes], environment: Mapping[str, str]) -> Child:
        """A fresh Python process that runs ``module.main(descriptor of its connection, *descriptors)``.

        It is in a session of its own, which a Ctrl-C on the terminal does not reach. Its output goes to ``log``.
        """

        def start(theirs: Connection) -> int:
            inherited = theirs.fileno(), *descriptors
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import main; main({', '.join(map(str, inherited))})"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=inherited,
                start_new_session=True,
            )
            process.returncode = 0  # reaped here, not by subprocess
            return process.pid

        return cls(start, leads=True)

    @classmethod
    def fork(cls, work: Callable[[Connection], object]) -> Child:
        """A fork of this process that does its ``work`` with its end of the connection, and ends."""

        def start(theirs: Connection) -> int:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            with warnings.catch_warnings(action="ignore"):  # about threads: callers check whether the child answers
                if pid := fork():
                    return pid
            try:
                close_inherited()
                work(theirs)
            finally:
                os._exit(0)

        return cls(start)

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._end.alive and self._life.ended(0.0) is None

    def send(self, message: Any, patience: float = math.inf) -> None:
        """Send one message. Raises ChildDied where the child has closed its end, ChildSilent as ``receive`` does."""
        try:
            if math.isfinite(patience):
                with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                    # zero would be no limit
                    limit = struct.pack("ll", int(patience), max(1, int(patience % 1 * 1e6)))
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self.connection.send(message)
        except BlockingIOError:
            self.close()
            raise ChildSilent from None
        except OSError:
            raise self._died() from None

    def receive(self, patience: float = math.inf) -> Any:
        """The next message. Raises ChildDied, or ChildSilent after ``patience`` seconds without one (child killed)."""
        deadline = time.monotonic() + patience
        try:
            while not self.connection.poll(max(0.0, min(deadline - time.monotonic(), _LOOK_SECONDS))):
                if time.monotonic() >= deadline:
                    self.close()
                    raise ChildSilent
                if not self.alive and not self.connection.poll():  # its own children may hold the connection open
                    raise self._died()
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def close(self) -> None:
        """End the child. May be called more than once."""
        self._end()

    def _died(self) -> ChildDied:
        """The error for a child that has closed its connection; it is killed where it does not exit soon."""
        code = self._life.ended(_ENDING)
        self.close()
        return ChildDied(code)


class _Life:
    """Whether a process still runs: one that this process started itself (``own``), or that a child of it did."""

    def __init__(self, pid: int, own: bool, leads: bool) -> None:
        self._pid, self.leads = pid, leads
        self._code: int | None = None
        self._handle: int | None = None
        if not own:
            self._handle = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._handle)

    def ended(self, seconds: float) -> int | None:
        """Its exit code (0 for another's child), negative for a signal; None where it does not end within the time."""
        if self._code is not None:
            return self._code
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            self._code = 0 if poll.poll(seconds * 1000) else None
        elif (status := wait(self._pid, seconds)) is not None:
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.leads:
                os.killpg(self._pid, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)


def _end(owner: int, life: _Life, connection: Connection) -> None:
    """Close the connection, which ends an idle child; kill it where that is not enough."""
    if os.getpid() != owner:
        return  # a fork of the owner: the child is not ours
    connection.close()
    if life.ended(0.0 if life.leads else _IDLE) is None:
        life.kill()
        life.ended(_ENDING)


def in_a_fork(question: Callable[[], T]) -> T | None:
    """The result of ``question`` in a fork of this process, which then ends with all it opened; None where it fails."""
    with (
        contextlib.suppress(AttributeError, OSError, ChildDied, ChildSilent),
        contextlib.closing(Child.fork(lambda theirs: theirs.send(question()))) as child,
    ):
        return child.receive(_ANSWER)
    return None


def be_killed_first() -> None:
    """Let the system kill this child if memory runs out, and not its parent, which has all results."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def close_inherited() -> None:
    """In a child that was forked: close its copies of the connections to other children."""
    for connection in list(_open_ends):
        connection.close()


def wait(pid: int, seconds: float) -> int | None:
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


def child_environment(wanted: Mapping[str, str] = {}) -> dict[str, str]:
    """This process's environment, in which the child finds the modules that this process does.

    ``wanted`` are variables to set where this process has not. What every process of this interpreter finds is not
    named: a child may start other interpreters.
    """
    installed = (*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__))
    here = str(Path(__file__).parents[1])
    paths = [os.path.abspath(path) for path in (*sys.path, here)]  # an empty one is the current folder
    own = [path for path in paths if not path.startswith(installed)]  # setuptools adds folders of its own below one
    return {**wanted, **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(own)), "PYTHONUNBUFFERED": "1"}


def last_lines(log: IO[bytes], most: int = 5) -> str:
    """The end of a log, for an error message; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        size = os.fstat(log.fileno()).st_size
        text = os.pread(log.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")  # the child writes on
        lines = [f"  {line.rstrip()}" for line in text.splitlines() if line.strip()]
        return "\n".join(lines[-most:])
    return ""


def launched() -> int:
    """Processes of the job that torchrun started this one for; 1 elsewhere."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def own_rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0")) if launched() > 1 else 0
