"""Processes of tests: forks that do something which may kill them, and whether a process is still there."""

import atexit
import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from autockpt.process import Child, ChildDied, close_inherited

Say = Callable[[Any], None]


def forked(work: Callable[[Say], object], *, leads: bool = False) -> Child:
    """A fork of this process, whose ``work`` is given what sends a message here.

    Nothing that it prints is seen but the traceback of what it raises. ``leads``: all that it starts ends with it.
    """
    return connected(lambda theirs: work(theirs.send), leads=leads)


def connected(work: Callable[[Connection], object], *, leads: bool) -> Child:
    """The same, whose ``work`` is given its end of the connection."""

    def start(theirs: Connection) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        code = 1
        try:
            close_inherited()
            if leads:
                os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            work(theirs)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    return Child(start, leads=leads)


def start_program(
    main: Callable[[], object], folder: Path, environment: Mapping[str, str], *arguments: str
) -> Callable[[], CompletedProcess[str]]:
    """Run ``main`` as an interpreter would, down to what is registered for its exit, in a fork of this process, which
    has imported torch and transformers already: they take seconds. Returns what waits for its end."""
    said = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  read when it has ended

    def work(say: Say) -> None:
        for number, file in enumerate(said, 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        sys.argv = ["program", *arguments]
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        atexit._clear()
        warnings.simplefilter("ignore")
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

    child = forked(work)

    def end() -> CompletedProcess[str]:
        try:
            raise AssertionError(child.receive())  # it sends nothing
        except ChildDied as death:
            code = death.code
        for file in said:
            file.seek(0)
        return CompletedProcess(arguments, 1 if code is None else code, *(file.read() for file in said))

    return end


@dataclass(eq=False)
class Fork:
    """What came of one item: the messages of its process, and how that ended if not by itself."""

    item: Any
    child: Child
    said: list[Any] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    ended: str = ""


def each_forked(
    todo: deque[Any], work: Callable[[Any, Say], object], *, seconds: float, jobs: int = 1
) -> Iterator[Fork]:
    """Every item's work in a fork of its own, ``jobs`` at a time, each as soon as it has ended: nothing that one meets
    takes the others down. One that says nothing for so many seconds is ended."""
    running: list[Fork] = []
    gc.collect()
    gc.freeze()
    try:
        while todo or running:
            while todo and len(running) < jobs:
                item = todo.popleft()
                running.append(Fork(item, forked(partial(work, item), leads=True)))
            ready = wait([fork.child.connection for fork in running], 1.0)
            for fork in list(running):
                try:
                    if fork.child.connection in ready:
                        fork.said.append(fork.child.receive())
                        fork.heard = time.monotonic()
                    if time.monotonic() - fork.heard < seconds:
                        continue
                    fork.ended = f"silent for {seconds:.0f} s"
                except ChildDied as death:
                    fork.ended = _how(death.code)
                running.remove(fork)
                fork.child.close()
                yield fork
    finally:
        for fork in running:
            fork.child.close()


def _how(code: int | None) -> str:
    """``signal 9`` or ``exit 1``; empty for an end as it should be."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit {code}" if code else ""


def children() -> set[str]:
    """Processes that this one started and that are still there."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def is_gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
