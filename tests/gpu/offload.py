"""Part 2: copies run beside compute, nothing is used after it was freed, and host memory keeps to its budget."""

import random
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.devices.hostpool import HostUse
from autockpt.devices.streams import CudaQueues, StreamTransport
from autockpt.devices.transport import OffloadTransports, host_bytes_of
from autockpt.errors import HostBudgetExceeded
from autockpt.measuring import StepRunner
from autockpt.runtime import attach
from autockpt.schema import Choice, Offload, WorkloadSpec
from tests.gpu.items import Context
from tests.gpu.kernels import hidden, merged, profiled, total
from tests.gpu.measuring import ghosts, gradients_of, plans, repeatable, running, wrong
from tests.policies.deferred import always

MOST_DELAY_CYCLES = 2_000_000  # of the GPU's clock: about a millisecond
SPARE_BYTES = 48 << 20
PROFILES = 3  # steps whose copies are looked at


class LateQueues(CudaQueues):
    """Copy streams that are behind by random times: what does not wait for them finds other bytes."""

    def __init__(self, device: torch.device, draw: random.Random) -> None:
        super().__init__(device)
        self._draw = draw

    def copy(self, direction: Any, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Any:
        with self._streams[direction]:
            torch.cuda._sleep(self._draw.randrange(MOST_DELAY_CYCLES))
        return super().copy(direction, target, source, after)


class Poison(TorchDispatchMode):
    """After some ops takes the blocks that the allocator hands out next, fills them with rubbish and frees them."""

    def __init__(self, device: torch.device, draw: random.Random) -> None:
        super().__init__()
        self._device, self._draw = device, draw
        self._sizes: deque[int] = deque(maxlen=12)
        self.blocks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() and out.layout is torch.strided:
            self._sizes.append(out.untyped_storage().nbytes())
        if self._sizes and self._draw.random() < 0.2:
            for size in self._draw.sample(list(self._sizes), min(3, len(self._sizes))):
                try:
                    torch.empty(size, dtype=torch.uint8, device=self._device).fill_(0xFF)
                except torch.OutOfMemoryError:  # memory is as short as it is meant to be
                    break
                self.blocks += 1
        return out


def stress(context: Context) -> dict[str, Any]:
    """Many steps with late copies, poisoned blocks and little memory: gradients equal plain training's, every step."""
    spec = WorkloadSpec.model_validate(context.shapes.stress)
    rows: dict[str, Any] = {}
    with running(spec, context.device) as (runner, units), repeatable(context.device):
        with runner.attached({}):
            wanted = gradients_of(runner)
            repeats = not wrong(gradients_of(runner), wanted)
        for name, choices in plans(units, ("offload all", "recompute and offload", "mixed")).items():
            rows[name] = _stressed(context, runner, choices, wanted)
            context.keep({"repeats": repeats, "rows": rows})
    return {"repeats": repeats, "rows": rows, "values": len(wanted)}


def _stressed(
    context: Context, runner: StepRunner, choices: Mapping[str, Choice], wanted: Mapping[str, str]
) -> dict[str, Any]:
    device = runner.device.torch_device
    draw = random.Random(11)
    limit: int | None = None
    if device.type == "cuda":
        limit = runner.measure(choices, steps=1).peak_bytes + SPARE_BYTES
    unequal: list[str] = []
    steps = context.shapes.stress_steps
    with runner.device.limit(limit), runner.attached({}):
        transport = always(StreamTransport(LateQueues(device, draw))) if device.type == "cuda" else None
        with attach(runner.workload.model, choices, transport=transport), Poison(device, draw) as poison:
            for step in range(steps):
                if found := wrong(gradients_of(runner), wanted):
                    unequal.append(f"step {step}: {len(found)} values, {found[0]}")
    return {
        "steps": steps,
        "unequal steps": len(unequal),
        "first": unequal[:3],
        "poisoned blocks": poison.blocks,
        "limit": limit,
        "host bytes": transport.pool.held_bytes if transport is not None else None,
    }


class CountingUse(HostUse):
    """Counts how often pools grow."""

    growths = 0

    def claim(self, nbytes: int) -> None:
        self.growths += nbytes > 0
        super().claim(nbytes)


def host_budget(context: Context) -> dict[str, Any]:
    """What offloading claims of the host: as predicted, within a budget, grown in the first step only."""
    spec = WorkloadSpec.model_validate(context.shapes.stress)
    with running(spec, context.device) as (runner, units), ghosts(spec, context.device) as tracer:
        choices = plans(units, ("offload all",))["offload all"]
        copies = tracer.trace(choices).copies
        predicted = host_bytes_of(copies, runner.device.kind)
        claimed, first, later, others = _claims(runner, choices, None)
        assert claimed is not None
        kind, tight = runner.device.kind, 1
        while (needed := host_bytes_of(copies, kind, tight)) > tight:  # the least that they get along with
            tight = needed
        found = {
            "predicted": predicted,
            "claimed": claimed,
            "growths in the first step": first,
            "growths in later steps": later,
            "growths in steps of other lengths": others,
            "budget": tight,
            "seconds to pin a GiB": _seconds_to_pin(runner.device.torch_device),
        }
        context.keep(found)
        within, *_ = _claims(runner, choices, tight)
        half, *_ = _claims(runner, choices, tight // 2)
        return found | {"claimed under the budget": within, "half of it refused": half is None}


def _claims(runner: StepRunner, choices: Mapping[str, Choice], budget: int | None) -> tuple[int | None, int, int, int]:
    """Most bytes claimed (None: refused), and how often pools grew in the first step, in three later ones, and in as
    many of shorter batches."""
    workload = runner.workload
    batch: Any = workload.batch
    transports = OffloadTransports(budget)
    transports.use = use = CountingUse(budget)
    with runner.attached({}), attach(runner.workload.model, choices, transport=transports):
        try:
            runner.run_cycle()
            first = use.growths
            for _ in range(3):
                runner.run_cycle()
            later = use.growths
            for share in (0.75, 0.5, 0.9):
                workload.batch = {name: value[:, : int(share * value.shape[1])] for name, value in batch.items()}
                runner.run_cycle()
        except HostBudgetExceeded:
            return None, 0, 0, 0
        finally:
            workload.batch = batch
    return use.peak, first, later - first, use.growths - later


def _seconds_to_pin(device: torch.device, nbytes: int = 1 << 30) -> float | None:
    if device.type != "cuda":
        return None
    queues = CudaQueues(device)
    began = time.perf_counter()
    memory = queues.host_memory(nbytes)
    seconds = time.perf_counter() - began
    del memory
    return seconds


def disk_tier(context: Context) -> dict[str, Any]:
    """The disk tier: gradients bit-equal with plain training, the host memory it takes, and its step time."""
    spec = WorkloadSpec.model_validate(context.shapes.stress)
    with running(spec, context.device) as (runner, units):
        disk: dict[str, Choice] = dict.fromkeys(units, Offload(tier="disk"))
        with repeatable(context.device), runner.attached({}):
            wanted = gradients_of(runner)
            with attach(runner.workload.model, disk) as session:
                unequal = sum(bool(wrong(gradients_of(runner), wanted)) for _ in range(3))
                host = session.host_bytes
        return {
            "unequal steps of 3": unequal,
            "host bytes": host,
            "step": runner.measure(disk, steps=3).step_seconds,
            "plain step": runner.measure({}, steps=3).step_seconds,
        }


def overlap(context: Context) -> dict[str, Any]:
    """The share of copy time that kernels hide, and what offloading costs a step, for three plans."""
    spec = WorkloadSpec.model_validate(context.shapes.overlap)
    names = ("save everything", "offload all", "offload every fourth", "offload every eighth")
    rows: dict[str, Any] = {}
    with running(spec, context.device) as (runner, units):
        for name, choices in plans(units, names).items():
            rows[name] = _overlapped(runner, choices)
            context.keep({"rows": rows})
    plain = rows["save everything"]["step"]
    for row in rows.values():
        # what no schedule can hide: copies out that take longer than the forward, a third of the step
        row["link allows it"] = row["host bytes"] > 0 and row["busiest link"] <= 0.8 * plain / 3
        row["overhead"] = row["step"] / plain - 1
    return {"rows": rows}


def _overlapped(runner: StepRunner, choices: Mapping[str, Choice]) -> dict[str, Any]:
    cuda = runner.device.kind == "cuda"
    with runner.attached(choices) as session:
        for _ in range(2):
            runner.run_cycle()
        step = statistics.median(runner.time_cycle() for _ in range(5))
        profiles = [profiled(runner.run_cycle, cuda) for _ in range(PROFILES)]
        host = session.host_bytes
    events = profiles[-1]
    kernels = [span for _, span in events.kernels]
    out, back = merged(events.out), merged(events.back)
    return {
        "step": step,
        "host bytes": host,
        "copy seconds": total(merged([*out, *back])),
        "busiest link": max(total(out), total(back)),
        "hidden": [hidden([*p.out, *p.back], [span for _, span in p.kernels]) for p in profiles],
        "hidden out": hidden(events.out, kernels),
        "hidden back": hidden(events.back, kernels),
    }
