"""One forked child per architecture, with limits on time and memory: nothing it meets takes the sweep down."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait

import torch

from autockpt.process import Child, ChildDied
from autockpt.tracing.run import GhostRun
from autockpt.workload import Step
from tests.children import forked, how_it_ended
from tests.evidence.sweep.catalogue import Architecture
from tests.evidence.sweep.trial import Result, try_out

SECONDS = 90.0
# Private memory that can be written. An address-space limit would count what ghost runs reserve and never touch.
BYTES = 3 * 2**30


@dataclass(eq=False)
class _Trial:
    """``result`` is the last one that arrived."""

    child: Child
    result: Result
    begin: float = field(default_factory=time.monotonic)

    def ended(self, how: str) -> Result:
        self.child.close()
        if not self.result.seconds:  # set by a child that came to its end
            self.result.seconds = time.monotonic() - self.begin
            self.result.remarks.insert(0, how)
        return self.result


def run_all(todo: Sequence[Architecture], jobs: int, seed: int) -> Iterator[Result]:
    """Results as they come, ``jobs`` children at a time. Children that are still there at the end are ended."""
    waiting, running = list(reversed(todo)), list[_Trial]()
    gc.collect()
    gc.freeze()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                a = waiting.pop()
                child = forked(partial(_work, a, seed), leads=True)
                running.append(_Trial(child, Result(a.name, a.cls)))
            ready = wait([trial.child.connection for trial in running], 1.0)
            for trial in list(running):
                how = ""
                if trial.child.connection in ready:
                    try:
                        trial.result = trial.child.receive()
                    except ChildDied as death:
                        how = f"its process died ({how_it_ended(death.code)})"
                elif time.monotonic() - trial.begin > SECONDS:
                    how = f"took more than {SECONDS:.0f} s"
                if how:
                    running.remove(trial)
                    yield trial.ended(how)
    finally:
        for trial in running:
            trial.child.close()


def _work(architecture: Architecture, seed: int, say: Callable[[Result], None]) -> None:
    os.dup2(1, 2)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say(try_out(architecture, seed, say))


def warm_up() -> None:
    """Import and run once, in this process, what every child would otherwise load for itself."""
    try_out(Architecture("gpt2", "GPT2LMHeadModel", "CAUSAL_LM"), 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    run = GhostRun(writable=True)  # the tracer's own happens in a process of its own
    run.copy(
        Step(model, torch.ones(2, 4), loss=lambda m, x: m(x).sum(), optimizer=torch.optim.AdamW(model.parameters()))
    )
    run.trace({})
