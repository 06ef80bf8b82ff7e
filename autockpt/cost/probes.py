"""Timing on the device at hand: the clock, the host's part of a step, and copies by the transport of offload."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.devices import transport_for
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, Choice
from autockpt.workload import Step, discover_units

T = TypeVar("T")
COPY_ROUNDS = 5
SECONDS_AHEAD_PER_CALL = 2e-5
_CLOCK_HERTZ = 2e9
LEAST_SAMPLE = 2e-3  # seconds: shorter samples are repeated until they last that long


def keep_busy(device: torch.device, seconds: float) -> None:
    """Give an accelerator about so long to wait, in which the host queues what comes next: else it would wait for the
    host, and short ops would seem to take as long as launching them. So they do where it has no ``_sleep`` as CUDA."""
    if (sleep := getattr(torch.get_device_module(device), "_sleep", None)) is not None:
        sleep(int(seconds * _CLOCK_HERTZ))


@dataclass(frozen=True)
class Stopwatch:
    """Seconds of a function on one device: the median of ``repeats`` samples after a warm-up.

    On one CPU thread the processor's own time counts, so that what else runs on the machine is no part of it; on an
    accelerator events on the device, so that the host is none.
    """

    device: torch.device
    repeats: int = 7

    def seconds(self, fn: Callable[[], Any]) -> float:
        """Of one call of ``fn``."""
        fn()
        calls = max(1, min(1000, round(LEAST_SAMPLE / max(self.sample(fn, 1), 1e-7))))
        return statistics.median(self.sample(fn, calls) for _ in range(self.repeats)) / calls

    def sample(self, fn: Callable[[], Any], calls: int) -> float:
        """Seconds of ``calls`` calls."""
        if self.device.type != "cpu":
            keep_busy(self.device, calls * SECONDS_AHEAD_PER_CALL)
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            stream = torch.accelerator.current_stream(self.device)
            begin.record(stream)
            for _ in range(calls):
                fn()
            end.record(stream)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for _ in range(calls):
            fn()
        return clock() - start


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def host_costs(clock: Stopwatch, workload: Step, cycles: int) -> tuple[float, float]:
    """Host seconds per op of a training step, and per region that runs again besides its ops.

    ``workload`` is a real step with next to no arithmetic; its cycles are interleaved, plainly and with every layer
    recomputed.
    """
    layers = [unit.name for unit in discover_units(workload.model) if unit.role == "block"]
    plans = ({}, dict.fromkeys(layers, RECOMPUTE))
    plain_ops, ops = (_under(workload, plan, lambda: _ops_in(workload.cycle)) for plan in plans)
    rounds = [
        tuple(_under(workload, plan, lambda: _host_seconds(clock, workload.cycle)) for plan in plans)
        for _ in range(cycles)
    ]
    launch = statistics.median(plain for plain, _ in rounds) / plain_ops
    extra = statistics.median(again - plain for plain, again in rounds) - (ops - plain_ops) * launch
    return launch, max(extra, 0.0) / len(layers)


def _under(workload: Step, plan: Mapping[str, Choice], measure: Callable[[], T]) -> T:
    """What ``measure`` finds with a plan attached, after a cycle that warms up."""
    with attach(workload.model, plan, sentinels="off") as session:
        session.in_mid_training()
        workload.cycle()
        return measure()


def _ops_in(fn: Callable[[], Any]) -> int:
    counter = _Counter()
    with counter:
        fn()
    return counter.ops


def _host_seconds(clock: Stopwatch, fn: Callable[[], Any]) -> float:
    if clock.device.type == "cpu":
        return clock.sample(fn, 1)
    torch.accelerator.synchronize(clock.device)
    start = time.perf_counter()
    fn()
    seconds = time.perf_counter() - start  # not synchronised: the host's part
    torch.accelerator.synchronize(clock.device)
    return seconds


def by_transport(
    device: torch.device, nbytes: int, count: int, now: Callable[[], float], wait: Callable[[], None]
) -> tuple[float, float]:
    """Bytes per second off the device and back, by the transport that offload uses: the best of some rounds.

    Many copies of one size in buffers that earlier rounds used, as in training's steady state. ``now`` is the clock,
    ``wait`` returns when the device has done all of its work.
    """
    transport = transport_for(device)
    sources = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    best_out = best_back = float("inf")
    for _ in range(COPY_ROUNDS):
        wait()
        start = now()
        handles = [transport.send(source) for source in sources]
        for handle in handles:
            handle.settle()
        wait()
        middle = now()
        while handles:
            handles.pop().get()
        wait()
        best_out, best_back = min(best_out, middle - start), min(best_back, now() - middle)
    return count * nbytes / best_out, count * nbytes / best_back
