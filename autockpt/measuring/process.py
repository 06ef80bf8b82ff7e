"""A child process that is spoken to in JSON lines over two pipes of its own, and that never outlives its use."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_LOOK_SECONDS = 1.0


class ChildDied(Exception):
    """The child is gone. ``code`` as in subprocess: negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class ChildSilent(Exception):
    """The child sent nothing for as long as was waited; it has been killed."""


class Child:
    """``python -m module READ_FD WRITE_FD`` in a session of its own, which a Ctrl-C on the terminal does not reach.

    Its output goes to ``log``. It is killed, with all processes it started, on ``kill``, when this object goes, and
    when the interpreter exits; the child itself should end when its pipe does.
    """

    def __init__(self, module: str, *, log: IO[bytes], environment: Mapping[str, str]) -> None:
        child_reads, self._to_child = os.pipe()
        self._from_child, child_writes = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(child_reads), str(child_writes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=(child_reads, child_writes),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._to_child)
            os.close(self._from_child)
            raise
        finally:
            os.close(child_reads)
            os.close(child_writes)
        os.set_blocking(self._to_child, False)
        self._buffer = bytearray()
        # Runs on kill, when this object goes, or when the interpreter exits, whichever comes first.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, (self._to_child, self._from_child))

    @property
    def alive(self) -> bool:
        """Whether the child runs."""
        return self._end.alive and self._process.poll() is None

    def send(self, message: Mapping[str, Any], patience: float) -> None:
        """Send one message. Raises ChildDied where nobody reads any more, ChildSilent as ``receive`` does."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + patience
        while data:
            self._wait([], [self._to_child], deadline)
            try:
                data = data[os.write(self._to_child, data) :]
            except BlockingIOError:
                continue
            except OSError:
                raise ChildDied(self._exit_code()) from None

    def receive(self, patience: float) -> dict[str, Any]:
        """The next message. Raises ChildDied, or ChildSilent after ``patience`` seconds without one (child killed)."""
        deadline = time.monotonic() + patience
        while (end := self._buffer.find(b"\n")) < 0:
            self._wait([self._from_child], [], deadline)
            data = os.read(self._from_child, 1 << 16)
            if not data:
                raise ChildDied(self._exit_code())
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)

    def kill(self) -> None:
        """End the child and everything it started, now. May be called more than once."""
        self._end()

    def _wait(self, reads: list[int], writes: list[int], deadline: float) -> None:
        """Until a pipe is ready, looking whether the child lives: its own children may hold its pipes open."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                raise ChildSilent
            if any(select.select(reads, writes, [], min(left, _LOOK_SECONDS))):
                return
            if self._process.poll() is not None:
                raise ChildDied(self._exit_code())

    def _exit_code(self) -> int:
        """The exit code of a child that has closed its pipe, killed where it does not exit soon."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        return code


def _end(owner: int, process: subprocess.Popen[bytes], pipes: Sequence[int]) -> None:
    """Close the pipes, kill the child's whole process group and reap it."""
    if os.getpid() != owner:  # a fork of the owner: the child is not its to end
        return
    for pipe in pipes:
        with contextlib.suppress(OSError):
            os.close(pipe)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def child_environment(wanted: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, in which the child finds this very autockpt.

    ``wanted`` are variables to set where this process has not.
    """
    environment = {**wanted, **os.environ}
    root = str(Path(__file__).resolve().parents[2])
    if Path(root).name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (known, root)))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def last_lines(path: Path) -> str:
    """The end of a log, for an error message; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [f"  {line.rstrip()}" for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-5:])
