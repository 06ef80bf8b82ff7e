"""Part 1: a step's kernels are plain training's and what is recomputed, its bits are plain training's, memory is really
released, and what a choice costs the host."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from autockpt.errors import ConflictError, InPlaceError, RerunMismatch
from autockpt.measuring import StepRunner
from autockpt.measuring.failures import device_lost
from autockpt.schema import WorkloadSpec, parse_choice
from autockpt.schema.choices import choice_kinds
from autockpt.verification import digest
from tests.evidence import host_cost as cost
from tests.gpu.items import Context
from tests.gpu.kernels import merged, profiled, total
from tests.gpu.measuring import (
    alive_before,
    allocated,
    first_of,
    ghosts,
    gradients_of,
    plans,
    repeatable,
    running,
    wrong,
)

ATTENTION_KERNELS = re.compile(r"flash|fmha|sdpa|cudnn.*attention|attention.*cudnn|efficient_attention", re.I)
BACKWARD_KERNELS = re.compile(r"bwd|bprop|backward|dot_do_o|convert_dq", re.I)
CHOICES = [kind for kind in choice_kinds("block") if kind != "compile_budget"]  # which saves what is not compiled
UNCHECKED = 5  # calls after which the next one is neither checked nor recorded


def kernels(context: Context) -> dict[str, Any]:
    """What one step runs on the device under every choice, beside plain training.

    More kernels only where something is recomputed, none unknown to plain training, and no further wait of the host.
    """
    spec = WorkloadSpec.model_validate(context.shapes.kernels)
    rows: dict[str, Any] = {}
    plain, waits = Counter[str](), 0
    with running(spec, context.device) as (runner, units), ghosts(spec, context.device) as tracer:
        for kind in ("save", *(kind for kind in CHOICES if kind != "save")):
            choices = dict.fromkeys(units, parse_choice(kind))
            with runner.attached(choices):
                for _ in range(UNCHECKED):
                    runner.run_cycle()
                events = profiled(runner.run_cycle, context.device != "cpu")
            names = Counter(name for name, _ in events.kernels)
            plain, waits = (names, len(events.waits)) if kind == "save" else (plain, waits)
            fused = [n for n in names.elements() if ATTENTION_KERNELS.search(n) and not BACKWARD_KERNELS.search(n)]
            rows[kind] = {
                "device seconds": total(merged(span for _, span in events.kernels)),
                "kernels": names.total(),
                "more than plain": (names - plain).total(),
                "fewer": (plain - names).total(),
                "ops recomputed, ghost": sum(op.phase == "recompute" for op in tracer.trace(choices).ops),
                "attentions forward": len(fused),
                "further waits": len(events.waits) - waits,
                "unknown to plain": sorted(names.keys() - plain.keys())[:3],
            }
            context.keep({"rows": rows})
    return {"layers": len(units), "rows": rows}


def captured(context: Context) -> dict[str, Any]:
    """A step in a CUDA graph, as torchtitan captures its own: gradients of its replays beside those without a plan."""
    if context.device == "cpu":
        return {"rows": {}, "why": "a CPU captures no graph"}
    rows: dict[str, Any] = {}
    spec = WorkloadSpec.model_validate(context.shapes.kernels)
    with repeatable(context.device), running(spec, context.device) as (runner, units):
        tokens = runner.workload.batch["input_ids"]
        both = tokens.clone(), tokens.flip(-1)
        with runner.attached({}):
            wanted = _replayed(runner, both)
        for kind in CHOICES:
            try:
                with runner.attached(dict.fromkeys(units, parse_choice(kind))):
                    found = _replayed(runner, both)
            except Exception as error:  # one that a capture forbids, too
                if device_lost(error):
                    raise
                rows[kind] = {"message": f"{type(error).__name__}: {error}"[:200]}
            else:
                unequal = [name for got, plain in zip(found, wanted, strict=True) for name in wrong(got, plain)]
                rows[kind] = {"values": len(wanted[0]), "unequal": len(unequal), "first": next(iter(unequal), "")}
            context.keep({"rows": rows})
    return {"rows": rows}


def _replayed(runner: StepRunner, batches: tuple[torch.Tensor, ...]) -> list[dict[str, str]]:
    """Digests of the gradients that one captured forward and backward gives for each of the batches."""
    workload, side, graph = runner.workload, torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(UNCHECKED):
            workload.forward_backward()
            workload.release_gradients()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        workload.forward_backward()
    found = []
    for batch in batches:
        workload.batch["input_ids"].copy_(batch)
        graph.replay()
        named = workload.model.named_parameters()
        found.append({name: digest(p.grad) for name, p in named if p.grad is not None})
    workload.release_gradients()
    return found


def bits(context: Context) -> dict[str, Any]:
    """Gradients under every choice on every layer beside plain training's, with weights as the specs have them.

    What the contract suite does by small models; here are the sizes, kernels and 16-bit weights of a real job.
    """
    rows: dict[str, Any] = {}
    for what, given in context.shapes.bits.items():
        spec = WorkloadSpec.model_validate(given)
        with repeatable(context.device), running(spec, context.device) as (runner, units):
            with runner.attached({}):
                wanted = gradients_of(runner)
                repeats = not wrong(gradients_of(runner), wanted)
            for kind in CHOICES:
                rows[f"{what}: {kind}"] = {"repeats": repeats, **_bits_of(runner, units, kind, wanted)}
                context.keep({"rows": rows})
    return {"rows": rows}


def _bits_of(runner: StepRunner, units: list[str], kind: str, wanted: Mapping[str, str]) -> dict[str, Any]:
    try:
        with runner.attached(dict.fromkeys(units, parse_choice(kind))):
            unequal = {name: None for _ in range(2) for name in wrong(gradients_of(runner), wanted)}
    except (RerunMismatch, InPlaceError) as error:  # found wrong while it trained
        return {"values": len(wanted), "unequal": len(wanted), "first": str(error)[:200]}
    except ConflictError as error:
        return {"values": 0, "unequal": 0, "message": error.message[:200]}
    return {"values": len(wanted), "unequal": len(unequal), "first": next(iter(unequal), "")}


def released(context: Context) -> dict[str, Any]:
    """Bytes alive after forward, after backward and at the peak, beside the ghost run's, by plan."""
    spec = WorkloadSpec.model_validate(context.shapes.kernels)
    names = ("save everything", "recompute all", "keep attention", "offload all", "recompute and offload")
    rows: dict[str, Any] = {}
    with running(spec, context.device) as (runner, units), ghosts(spec, context.device) as tracer:
        place = runner.device.torch_device
        for name, choices in plans(units, names).items():
            marks: dict[str, int | None] = {}
            with runner.attached(choices):
                runner.run_cycle()
                runner.run_cycle(mark=lambda phase, marks=marks: marks.update({str(phase): allocated(place)}))
                peak = runner.measure_peak()
            graph = tracer.trace(choices)
            base = marks.get("forward")
            rows[name] = {
                "after forward": _beyond(marks.get("backward"), base),
                "after forward, ghost": alive_before(graph, first_of(graph, ("backward", "recompute")))
                - graph.resident_bytes,
                "after backward": _beyond(marks.get("optimizer"), base),
                "after backward, ghost": alive_before(graph, first_of(graph, ("optimizer",))) - graph.resident_bytes,
                "peak": peak.allocated_bytes or peak.peak_bytes,
                "peak, ghost": graph.peak_bytes,
            }
    return {"rows": rows}


def _beyond(now: int | None, base: int | None) -> int | None:
    return None if now is None or base is None else now - base


def host_cost(context: Context) -> dict[str, Any]:
    """Host time of every choice per layer on layers that are next to nothing."""

    def kept(rows: cost.Rows) -> dict[str, Any]:
        return {"rows": rows, "layers": cost.LAYERS}

    rows = cost.measure(context.device, context.shapes.host_rounds, keep=lambda rows: context.keep(kept(rows)))
    return kept(rows)
