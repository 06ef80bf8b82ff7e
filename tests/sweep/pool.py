"""One forked child per architecture, with limits on time and memory: nothing it meets takes the sweep down."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from autockpt.tracing.run import GhostRun
from autockpt.workload import Step
from tests.sweep.catalogue import Architecture
from tests.sweep.trial import Result, try_out

SECONDS = 90.0
# Private memory that can be written. An address-space limit would count what ghost runs reserve and never touch.
BYTES = 3 * 2**30


@dataclass
class _Child:
    architecture: Architecture
    pid: int
    pipe: int
    begin: float = field(default_factory=time.monotonic)
    data: bytes = b""
    status: int = 0
    late: bool = False


def run_all(
    todo: Sequence[Architecture], jobs: int, work: Callable[[Architecture, Callable[[Result], None]], Result]
) -> Iterator[Result]:
    """Results as they come, ``jobs`` children at a time. Children that are still there at the end are ended."""
    waiting, running = list(reversed(todo)), {}
    gc.collect()
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    child = _start(waiting.pop(), work)
                    running[child.pipe] = child
                    selector.register(child.pipe, selectors.EVENT_READ)
                for key, _ in selector.select(timeout=1.0):
                    child = running[key.fd]
                    if data := os.read(child.pipe, 1 << 16):
                        child.data += data
                        continue
                    selector.unregister(child.pipe)
                    del running[child.pipe]
                    yield _finish(child)
                for child in running.values():
                    if not child.late and time.monotonic() - child.begin > SECONDS:
                        child.late = True
                        _kill(child)
        finally:
            for child in running.values():
                _kill(child)
                _finish(child)


def _start(architecture: Architecture, work: Callable[..., Result]) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(architecture, pid, reading)
    try:
        os.setsid()
        os.close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def say(result: Result) -> None:
            data = pickle.dumps(result)
            os.write(writing, len(data).to_bytes(8, "big") + data)

        say(work(architecture, say))
    finally:
        os._exit(0)


def _finish(child: _Child) -> Result:
    """The last result that arrived, with a word about how the child ended."""
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    _kill(child)  # what it may have left behind
    results, data = [], child.data
    while len(data) >= 8 and len(data) >= 8 + (size := int.from_bytes(data[:8], "big")):
        results.append(pickle.loads(data[8 : 8 + size]))
        data = data[8 + size :]
    a = child.architecture
    result = results[-1] if results else Result(a.name, a.cls, a.task)
    if not result.seconds:  # set by a child that came to its end
        result.seconds = time.monotonic() - child.begin
        how = f"took more than {SECONDS:.0f} s" if child.late else f"its process died ({_how(status)})"
        result.remarks.insert(0, how)
    return result


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _kill(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def warm_up() -> None:
    """Import and run once, in this process, what every child would otherwise load for itself."""
    try_out(Architecture("gpt2", "GPT2LMHeadModel", "CAUSAL_LM"), 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    run = GhostRun(writable=True)  # the tracer's own happens in a process of its own
    run.copy(
        Step(model, torch.ones(2, 4), loss=lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW(model.parameters()))
    )
    run.trace({})


def default_work(seed: int) -> Callable[[Architecture, Callable[[Result], None]], Result]:
    def work(architecture: Architecture, say: Callable[[Result], None]) -> Result:
        return try_out(architecture, seed, say)

    return work
