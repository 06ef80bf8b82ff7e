"""Ways out of a budget that no plan reaches: the mildest change of each sort that fits, found by ghost runs alone.

Every change is judged with the same choice on every layer, so a search after it can only do better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from autockpt.errors import AutockptError, InfeasibleError
from autockpt.profiling import Predictor, Uniform, uniform_graphs
from autockpt.schema import Choice, Prediction, SearchRequest, WorkloadSpec, format_bytes, plan_hash
from autockpt.schema.choices import CHUNKED_LOSS
from autockpt.schema.remedy import WayOut
from autockpt.schema.workload import OptimizerName
from autockpt.tracing import Tracer
from autockpt.tuning.inexact import FixedTracer, Times
from autockpt.tuning.job import Clock

MOST = 3
LORA_RANK = 16
SHORTEST = 128  # tokens
LEAN_KINDS = ("recompute_offload", "offload", "recompute")  # tried first: one of them is the leanest nearly always


@dataclass(frozen=True)
class Change:
    """A variant of the job, what it is called, and whether its head runs in chunks."""

    spec: WorkloadSpec
    options: str
    effect: str
    chunked: bool = False


@dataclass(frozen=True)
class Bench:
    """What variants are judged by: their budget in bytes, the device they would run on, and its op times.

    ``kinds`` are the choices that are allowed; ``seconds``: whether op times are good for more than ranking.
    """

    budget: int
    device: torch.device
    times: Times
    kinds: tuple[str, ...]
    seconds: bool = True


def ways_out(
    spec: WorkloadSpec, settings: Mapping[str, Any], base: Uniform, bench: Bench, *, chunked: bool = False
) -> tuple[WayOut, ...]:
    """The cheapest ways to make a job fit, at most three, fewest simulated seconds per token first.

    ``settings`` are the resolved ones of the job, ``base`` the ghost runs of its uniform plans. ``chunked``: its head
    runs in chunks already. Empty where nothing that is tried fits. Variants that cannot be built are left out.
    """
    leanest = min(_predictions(bench, base).values(), key=lambda p: p.peak_bytes)
    standard = (leanest.step_seconds or 0.0) / _work(settings)
    found = []
    for family in _families(spec, settings, chunked):
        if (way := _mildest(family, bench, standard)) is not None:
            found.append(way)
    if not found and (way := _mildest(_together(spec, settings), bench, standard)) is not None:
        found.append(way)
    return tuple(sorted(found, key=lambda way: way.relative_cost)[:MOST])


def explained(
    error: InfeasibleError,
    request: SearchRequest,
    settings: Mapping[str, Any],
    uniform: Uniform,
    bench: Bench,
    clock: Clock,
) -> InfeasibleError:
    """The error of a search with the ways out of it; as it is for a budget that is a share of the job's own peak."""
    if request.budget.kind not in ("bytes", "auto"):
        return error
    with clock.stage("look for ways out"):
        return with_ways_out(error, ways_out(request.workload, settings, uniform, bench, chunked=request.allow_inexact))


def with_ways_out(error: InfeasibleError, ways: Sequence[WayOut]) -> InfeasibleError:
    """The same error; its remedy ends with the ways out."""
    if not ways:
        return error
    lines = ["Cheapest ways out, each ghost-run with one choice on all layers; simulated, not measured:"]
    lines += [describe(way) for way in ways]
    return InfeasibleError(error.message, remedy="\n".join(lines), smallest_peak=error.smallest_peak, ways=ways)


def describe(way: WayOut) -> str:
    """One line for people."""
    step = f", {way.step_seconds:.3g} s a step" if way.step_seconds is not None else ""
    about = "" if way.step_seconds is not None else "about "
    return (
        f"{way.options}  simulated peak {format_bytes(way.peak_bytes)} with {way.plan}{step}, "
        f"{about}{way.relative_cost:.2f} times the seconds per token of the leanest plan ({way.effect})"
    )


def _families(spec: WorkloadSpec, settings: Mapping[str, Any], chunked: bool) -> Iterator[Iterator[Change]]:
    """Changes of one sort each, the mildest first."""
    yield _smaller_batches(spec, settings)
    if not chunked:
        yield iter([Change(spec, "--allow-inexact", "head and loss in chunks: gradients equal up to rounding", True)])
    if spec.lora is None:
        yield iter([_with_lora(spec)])
    yield _lean_optimizers(spec)
    yield _shorter_sequences(spec, settings)


def _smaller_batches(spec: WorkloadSpec, settings: Mapping[str, Any]) -> Iterator[Change]:
    rows = settings.get("batch_size")
    if not isinstance(rows, int):
        return
    for fewer in range(rows // 2, 0, -1):
        if rows % fewer:
            continue
        accumulate = spec.accumulate * (rows // fewer)
        yield Change(
            spec.model_copy(update={"batch_size": fewer, "accumulate": accumulate}),
            f"--batch-size {fewer} --accumulate {accumulate}",
            "the same rows in every optimizer step",
        )


def _shorter_sequences(spec: WorkloadSpec, settings: Mapping[str, Any]) -> Iterator[Change]:
    length = settings.get("seq_len")
    while isinstance(length, int) and length // 2 >= SHORTEST:
        length //= 2
        yield Change(
            spec.model_copy(update={"seq_len": length, "pad_to": None}), f"--seq-len {length}", "shorter sequences"
        )


def _with_lora(spec: WorkloadSpec) -> Change:
    return Change(spec.model_copy(update={"lora": LORA_RANK}), f"--lora {LORA_RANK}", "adapters only are trained")


def _lean_optimizers(spec: WorkloadSpec) -> Iterator[Change]:
    """Optimizers with fewer states, where the version at hand has them: 8-bit ones before SGD."""
    names = [name for name in get_args(OptimizerName) if name not in (spec.optimizer, "none")]
    lean = [name for name in names if "8bit" in name] + [name for name in names if name == "sgd"]
    for name in lean if spec.optimizer not in ("none", "sgd") else []:
        states = "no optimizer states" if name == "sgd" else "optimizer states in 8 bits"
        yield Change(spec.model_copy(update={"optimizer": name}), f"--optimizer {name}", f"{states}; other training")


def _together(spec: WorkloadSpec, settings: Mapping[str, Any]) -> Iterator[Change]:
    """All at once, for jobs that no single change helps: single rows, adapters, then shorter and shorter."""
    smallest = list(_smaller_batches(spec, settings))[-1:]
    start = smallest[0] if smallest else Change(spec, "", "")
    if spec.lora is None:
        lora = _with_lora(start.spec)
        start = Change(lora.spec, f"{start.options} {lora.options}".strip(), lora.effect)
        yield start
    for shorter in _shorter_sequences(start.spec, settings):
        effect = "; ".join(filter(None, (start.effect, shorter.effect)))
        yield Change(shorter.spec, f"{start.options} {shorter.options}".strip(), effect)


def _mildest(changes: Iterator[Change], bench: Bench, standard: float) -> WayOut | None:
    for change in changes:
        try:
            way = _judged(change, bench, standard)
        except AutockptError:
            return None  # this sort of change is not possible for this model
        if way is not None:
            return way
    return None


def _judged(change: Change, bench: Bench, standard: float) -> WayOut | None:
    """The change with the fastest uniform plan that fits; None where even the leanest does not."""
    with Tracer.from_spec(change.spec, device=bench.device, fallback=False) as tracer:
        if (change.chunked and tracer.head is None) or _ignored(change.spec, tracer.settings):
            return None
        fixed: dict[str, Choice] = {tracer.head.name: CHUNKED_LOSS} if change.chunked and tracer.head else {}
        traces = FixedTracer(tracer, fixed)
        blocks = [unit for unit in tracer.units if unit.role == "block"]
        lean = [kind for kind in LEAN_KINDS if kind in bench.kinds] or list(bench.kinds)
        uniform = dict(uniform_graphs(traces, blocks, lean))
        if not _fitting(bench, uniform):
            return None
        uniform |= uniform_graphs(traces, blocks, [kind for kind in bench.kinds if kind not in lean])
        fitting = _fitting(bench, uniform)
        work = _work(tracer.settings)
    kind, best = min(fitting.items(), key=lambda item: item[1].step_seconds or 0.0)
    return WayOut(
        options=change.options,
        effect=change.effect,
        plan=f"every layer on {kind}",
        peak_bytes=best.peak_bytes,
        step_seconds=best.step_seconds if bench.seconds else None,
        relative_cost=(best.step_seconds or 0.0) / work / standard if standard else 1.0,
    )


def _fitting(bench: Bench, uniform: Uniform) -> dict[str, Prediction]:
    return {kind: p for kind, p in _predictions(bench, uniform).items() if p.peak_bytes <= bench.budget}


def _predictions(bench: Bench, uniform: Uniform) -> dict[str, Prediction]:
    graphs = {plan_hash(choices): graph for choices, graph in uniform.values()}
    predictor = Predictor(lambda choices: graphs[plan_hash(choices)], bench.times(uniform))
    return {kind: predictor.predict(choices) for kind, (choices, _) in uniform.items()}


def _ignored(spec: WorkloadSpec, settings: Mapping[str, Any]) -> bool:
    """Whether the user's own function made something else than what was asked for."""
    asked = {"batch_size": spec.batch_size, "seq_len": spec.seq_len}
    return any(value is not None and settings.get(name) not in (None, value) for name, value in asked.items())


def _work(settings: Mapping[str, Any]) -> float:
    """Tokens of one cycle, or its rows."""
    tokens = settings.get("tokens")
    return float(tokens or (settings.get("batch_size") or 1) * (settings.get("accumulate") or 1))
