"""Measure op times: every op signature of a step is timed in real steps, once per device, versions and workload.

Ops that are timed in the step, with the caches as it leaves them, predict whole steps better than ops timed alone. One
cycle in which every unit recomputes runs every op that any plan can run. Costs that single ops do not show are fitted
to measured uniform plans (``calibrated``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.cost.simulation import simulate
from autockpt.devices import transport_for
from autockpt.policies.compiling import uncompiled
from autockpt.schema import Environment, Graph, OpTimes
from autockpt.schema.choices import parse_choices
from autockpt.schema.files import atomic_write, cache_directory
from autockpt.schema.graph import Tier
from autockpt.tracing.kernels.cuda_memory import kept_workspaces
from autockpt.tracing.kernels.operators import COLLECTIVES, WAITS
from autockpt.tracing.kernels.signature import RANKS, signature

if TYPE_CHECKING:
    from autockpt.measuring import StepRunner

COPY_PROBE_BYTES, COPY_PROBES = 4 * 2**20, 8
QUEUED_COPY_PROBE_BYTES = 32 * 2**20  # a link of 50 GB/s moves 4 MiB in the time that queueing a copy takes
# The device is kept busy while the host queues so many ops: a launch queue holds about a thousand entries, and an op
# makes three.
OPS_AHEAD, SECONDS_AHEAD_PER_OP = 200, 1e-4
DISK_PROBE_BYTES = 128 * 2**20
COPY_ROUNDS = 5
_CLOCK_HERTZ = 2e9
TIMED_SLOWER = 2.0  # times as long as others a cycle takes whose ops are timed, about
TIMED_OPS = "timed ops"
"""The runner's beat after each cycle whose ops were timed."""
VERSION = 5
"""Changes with what a file holds, and with how ops and whole plans are timed."""
WITH_HOST_TIME = ("selective", "remake")  # kinds of choices that cost the host time besides their ops
ANCHORS = ("save", "recompute", "offload", *WITH_HOST_TIME)  # kinds whose uniform plans are timed whole
RERUN_RANGE, QUEUED_RERUN_RANGE = (0.5, 2.0), (0.5, 8.0)
COPY_RANGE = (0.02, 5.0)  # probes of single copies are off by less than this


def keep_busy(device: torch.device, seconds: float) -> None:
    """Keep an accelerator busy for about ``seconds``, while the host queues the next ops.

    Else the device would wait for the host, and short ops would seem to take as long as their launch. Only CUDA can.
    """
    if (sleep := getattr(torch.get_device_module(device), "_sleep", None)) is not None:
        sleep(int(seconds * _CLOCK_HERTZ))


class OpTimer(TorchDispatchMode):
    """Seconds of every op by signature, those of the optimizer phase by "": by events on an accelerator.

    A collective takes from when all ranks are there (``barrier``) until its result is.
    """

    def __init__(self, device: torch.device, barrier: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._device, self._barrier = device, barrier
        self.phase = "forward"
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._pending: list[tuple[str, Any, Any]] | None = [] if device.type != "cpu" else None
        self._until_ahead = 0
        # what else runs on the core is no part of an op; with more threads the processor's time is that of all of them
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def mark(self, phase: str) -> None:
        self.phase = phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = signature(func, args, kwargs)
        name = "" if self.phase == "optimizer" else call
        run, now = func, self._now
        if self._barrier is not None and _is_collective(call):
            if re.search(rf"\b{RANKS}{distributed.get_world_size()}\b", call):  # one of some ranks is not run by all
                self._barrier()
            run, now = partial(_to_its_end, func), time.perf_counter  # another thread is at work
        if self._pending is not None:
            self._get_ahead()
            begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            stream = torch.accelerator.current_stream(self._device)
            begin.record(stream)
            out = run(*args, **kwargs)
            end.record(stream)
            self._pending.append((name, begin, end))
            return out
        start = now()
        out = run(*args, **kwargs)
        self.seconds[name].append(now() - start)
        return out

    def _get_ahead(self) -> None:
        """From time to time keep the device busy for as long as the host needs to queue the next ops."""
        if not self._until_ahead:
            keep_busy(self._device, OPS_AHEAD * SECONDS_AHEAD_PER_OP)
            self._until_ahead = OPS_AHEAD
        self._until_ahead -= 1

    def finish(self) -> None:
        if self._pending is not None:
            torch.accelerator.synchronize(self._device)
            for name, begin, end in self._pending:
                self.seconds[name].append(begin.elapsed_time(end) / 1e3)
            self._pending.clear()


def _is_collective(call: str) -> bool:
    """Whether an op is a collective; neither waits nor sends between two ranks are, which gloo waits for only once."""
    pairs = call.startswith(("c10d.send", "c10d.recv"))
    return call.startswith(COLLECTIVES) and not pairs and call.split(".")[1] not in WAITS


def _to_its_end(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a collective and wait for its end."""
    out = collective(*args, **kwargs)
    for part in out if isinstance(out, tuple | list) else (out,):
        if isinstance(part, torch.ScriptObject):  # c10d's handle of its work
            part.wait()  # type: ignore[attr-defined]
        elif isinstance(part, torch.Tensor):  # of functional ones; any other tensor is waited for already
            torch.ops._c10d_functional.wait_tensor(part)
    return out


def measure_in_runner(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Time every op of a cycle with ``payload["choices"]`` attached. Runs where the model lives.

    Returns seconds per signature (median: an op runs once in each layer, and again), the optimizer phase, the host's
    share per op, the copy bandwidths, with ``payload["disk"]`` those of the disk tier too, and the bytes that the
    context and matrix libraries have taken by then. Returns nothing where that would take longer than
    ``payload["within"]`` seconds.
    """
    began, within = time.monotonic(), payload.get("within", math.inf)
    device = runner.device.torch_device
    with runner.attached(parse_choices(payload["choices"])):
        runner.run_cycle()
        if (2 + TIMED_SLOWER) * (time.monotonic() - began) > within:
            return {}
        plain = runner.time_cycle()
        seconds, optimizer = _seconds_of_ops(runner)
    kernels = sum(map(sum, seconds.values()))
    residue = (plain - kernels - optimizer) / max(1, sum(map(len, seconds.values())))
    size = COPY_PROBE_BYTES if device.type == "cpu" else QUEUED_COPY_PROBE_BYTES  # about that of one activation
    out, back = by_transport(device, size, COPY_PROBES, runner.device.synchronize)
    disk = 0.0, 0.0
    if payload.get("disk"):
        disk = by_transport(device, DISK_PROBE_BYTES, 1, runner.device.synchronize, "disk")
    return {
        "seconds": _medians(seconds),
        "optimizer_seconds": optimizer,
        "host_seconds": max(0.0, residue),
        "copy_out_bandwidth": out,
        "copy_in_bandwidth": back,
        "disk_out_bandwidth": disk[0],
        "disk_in_bandwidth": disk[1],
        "context_bytes": runner.device.describe().overhead_bytes,
        "workspaces": kept_workspaces(device),
    }


def measure_more_in_runner(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per signature of a cycle with other ``payload["choices"]``, and nothing else."""
    with runner.attached(parse_choices(payload["choices"])):
        runner.run_cycle()
        seconds, _ = _seconds_of_ops(runner)
    return _medians(seconds)


def _seconds_of_ops(runner: StepRunner) -> tuple[dict[str, list[float]], float]:
    """The seconds of every op of a cycle by signature, and those of its optimizer phase together."""
    timer = OpTimer(runner.device.torch_device, runner.barrier)
    with uncompiled(), timer:
        runner.run_cycle(mark=timer.mark)
    timer.finish()
    runner.beat(TIMED_OPS)
    optimizer = sum(timer.seconds.pop("", ()))
    return timer.seconds, optimizer


def _medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def memory_of_others(runner: StepRunner, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes on the device that other processes hold."""
    return {"bytes": runner.device.used_by_others()}


def by_transport(
    device: torch.device, nbytes: int, count: int, wait: Callable[[], None], tier: Tier = "cpu"
) -> tuple[float, float]:
    """Bytes per second off the device and back, by the transport that offload uses.

    Many copies of one size in buffers that earlier rounds used, as in training's steady state: the best round, but of
    files the median, as no step gets the best. ``wait`` returns when the device has done all of its work.
    Raises MeasurementError where the disk is full or its folder cannot be written.
    """
    transport = transport_for(device, tier)
    sources = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
    out, back = [], []
    for _ in range(COPY_ROUNDS):
        wait()
        start = time.perf_counter()
        handles = [transport.send(source) for source in sources]
        for handle in handles:
            handle.settle()
        wait()
        middle = time.perf_counter()
        while handles:
            handles.pop().get()
        wait()
        out.append(middle - start)
        back.append(time.perf_counter() - middle)
    usual = statistics.median if tier == "disk" else min
    return count * nbytes / usual(out), count * nbytes / usual(back)


# The cache: one file per device, versions and workload. Each is written as a whole, so concurrent searches lose
# nothing.


def cached_op_times(
    environment: Environment, graphs: Iterable[Graph], workload: str, *, disk: bool = False
) -> OpTimes | None:
    """Op times of an earlier run with this device, versions and workload, if they cover the graphs and the ``disk``."""
    known = _read(_path(environment, workload))
    if known is None or (disk and not known.disk_out_bandwidth):
        return None
    return known if all(graph.timed <= known.seconds.keys() for graph in graphs) else None


def store(times: OpTimes, workload: str) -> None:
    """Add op times to those of the workload. If the cache cannot be written, the next run measures again."""
    path = _path(times.environment, workload)
    known = _read(path)
    with suppress(OSError):
        atomic_write(path, (times if known is None else times.completed(known.seconds)).model_dump_json(), parents=True)


def forget(environment: Environment, workload: str) -> None:
    """Remove the op times of this workload, so that they are measured again."""
    with suppress(OSError):
        _path(environment, workload).unlink()


def _read(path: Path) -> OpTimes | None:
    with suppress(OSError, ValidationError):
        return OpTimes.model_validate_json(path.read_bytes())
    return None


def _path(environment: Environment, workload: str) -> Path:
    text = json.dumps([VERSION, environment.model_dump(mode="json"), workload], sort_keys=True)
    return cache_directory() / "op_times" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


# Costs that only whole steps show: recomputed ops, copies that no queue hides, and the host's own time.
#
# They depend on their surroundings (caches, fresh memory), so they are fitted to the uniform plans: where every unit
# saves, recomputes or offloads, prediction and measurement agree. An accelerator waits for its host where ops are
# small, most of all in recomputation, which is Python's work. There the plan that saves gives the host's time per op,
# and the plan that recomputes its time per recomputed op, which may be several times that of the kernel. Partial
# recomputation costs host time in forward as well (hooks, bookkeeping): the time of its uniform plan beyond the ops of
# its ghost run.


def calibrated(times: OpTimes, graphs: Mapping[str, Graph], seconds: Mapping[str, float]) -> OpTimes:
    """``times`` with ``rerun_scale`` and ``choice_seconds`` set by whole steps; on devices without copy queues the copy
    bandwidths as well, on others ``host_seconds``.

    ``graphs`` are the ghost runs of the uniform plans by choice kind, ``seconds`` what their steps take. What lacks
    times besides those of ``save`` stays as it is.
    """
    if "save" not in seconds:
        return times
    queued = times.environment.device.copy_queues
    if queued:
        kernels = times.model_copy(update={"host_seconds": 0.0})
        idle = seconds["save"] - simulate(graphs["save"], kernels).step_seconds
        plan = graphs["save"]  # of its ops the host issues all but the optimizer's one by one
        issued = sum(runs for op, runs in zip(plan.ops, plan.runs, strict=True) if op.phase != "optimizer")
        times = kernels.model_copy(update={"host_seconds": max(0.0, idle) / max(1, issued)})
    if "recompute" in seconds:
        plain = simulate(graphs["recompute"], times)
        twice = times.model_copy(update={"rerun_scale": 2 * times.rerun_scale})
        again = simulate(graphs["recompute"], twice).step_seconds - plain.step_seconds
        extra = _target(times, graphs, seconds, "recompute") - (plain.step_seconds - again)
        if again > 0:
            scale = _within(extra / again, QUEUED_RERUN_RANGE if queued else RERUN_RANGE)
            times = times.model_copy(update={"rerun_scale": scale})
    if "offload" in seconds and not queued:
        plain = simulate(graphs["offload"], times)
        extra = _target(times, graphs, seconds, "offload") - (plain.step_seconds - plain.copy_seconds)
        if plain.copy_seconds > 0:
            scale = _within(extra / plain.copy_seconds, COPY_RANGE)
            rates = {name: getattr(times, name) / scale for name in ("copy_out_bandwidth", "copy_in_bandwidth")}
            times = times.model_copy(update=rates)
    host = {}
    for kind in WITH_HOST_TIME:
        if kind in seconds:
            extra = _target(times, graphs, seconds, kind) - simulate(graphs[kind], times).step_seconds
            host[kind] = max(0.0, extra) / max(1, len(graphs[kind].blocks()))
    return times.model_copy(update={"choice_seconds": host})


def _target(times: OpTimes, graphs: Mapping[str, Graph], seconds: Mapping[str, float], kind: str) -> float:
    """Seconds that a uniform plan should be simulated to take: its measured ratio to ``save`` times that simulated."""
    return seconds[kind] / seconds["save"] * simulate(graphs["save"], times).step_seconds


def _within(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])
