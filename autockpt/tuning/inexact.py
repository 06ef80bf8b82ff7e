"""``--allow-inexact``: whether every plan of a search also runs the output head and the loss over chunks of tokens.

Decided by ghost runs and nominal rates before anything is measured, so that one question always gets one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autockpt.errors import InfeasibleError
from autockpt.measuring import Measurer
from autockpt.profiling import Profiled, Uniform, build_profile, leanest, nominal_op_times, uniform_graphs
from autockpt.schema import Budget, Choice, Environment, Graph, Measurement, OpTimes, SearchSpace, Unit, format_bytes
from autockpt.schema.choices import CHUNKED_LOSS, ChunkedLoss, dump_choice
from autockpt.schema.known import NONE, known_plans
from autockpt.tracing import Tracer
from autockpt.tuning.dryrun import foresee

WORTH = 0.01
"""A way out is named, and smaller chunks are taken, where the leanest plan's peak falls by more than this share."""
CHUNKS = (256, 512, 1024, 2048, 4096)
"""Tokens of a chunk: below, products of an output head no longer keep a device busy."""


class FixedTracer:
    """Traces plans with some choices added to each."""

    def __init__(self, tracer: Tracer, fixed: Mapping[str, Choice]) -> None:
        self._tracer, self._fixed = tracer, dict(fixed)

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        return self._tracer.trace({**(choices or {}), **self._fixed})


class FixedMeasurer:
    """Measures plans with some choices added to each."""

    def __init__(self, inner: Measurer, fixed: Mapping[str, Choice]) -> None:
        self.inner, self._fixed = inner, dict(fixed)

    @property
    def environment(self) -> Environment:
        return self.inner.environment

    def measure(self, choices: Mapping[str, Choice], **how: Any) -> Measurement:
        return self.inner.measure({**choices, **self._fixed}, **how)

    def compare(self, plans: Mapping[str, Mapping[str, Choice]], **how: Any) -> dict[str, list[float]]:
        return self.inner.compare({name: {**c, **self._fixed} for name, c in plans.items()}, **how)

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        if "choices" in payload:
            wired = {name: dump_choice(choice) for name, choice in self._fixed.items()}
            payload = {**payload, "choices": {**payload["choices"], **wired}}
        return self.inner.call(ref, payload)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Settled:
    """What the search works with: choices that are part of every plan (none, or the head's), and why."""

    fixed: Mapping[str, Choice]
    traces: Tracer | FixedTracer
    uniform: Uniform
    budget: Budget
    note: str = ""

    @property
    def described(self) -> list[str]:
        """The fixed choices in words, for what names a run."""
        return sorted(f"{name}: {choice}" if choice != CHUNKED_LOSS else name for name, choice in self.fixed.items())


Times = Callable[[Uniform], OpTimes]  # op times that cover these ghost runs


def settle(
    tracer: Tracer,
    uniform: Uniform,
    budget: Budget,
    space: SearchSpace,
    times: Times,
    others: int,
    host_budget: int | None = None,
) -> Settled:
    """Use ``chunked_loss`` on the output head where the budget cannot be reached without, or it is predicted faster.

    A share of a budget is meant of the exact plans, and turned into bytes here. ``times`` are good enough for ranking.
    ``others``: device bytes in use.
    """
    plain = Settled({}, tracer, uniform, budget)
    if tracer.head is None:
        return Settled({}, tracer, uniform, budget, "--allow-inexact changes nothing: the model has no output head")
    name = tracer.head.name
    head = chunk_size(tracer, name, uniform)
    fixed: dict[str, Choice] = {name: head}
    exact = build_profile(tracer, times(uniform), uniform, used_by_others=others, host_budget=host_budget)
    size = _bytes(exact, budget, space)
    chunked = FixedTracer(tracer, fixed)
    blocks = [unit for unit in tracer.units if unit.role == "block"]
    other_uniform = uniform_graphs(chunked, blocks, space.choices)
    in_bytes = budget if budget.kind in ("bytes", "auto") else Budget(text=budget.text, kind="bytes", size=size)
    without = _seconds(exact, in_bytes, space)
    with_chunks = build_profile(
        chunked, times(other_uniform), other_uniform, used_by_others=others, host_budget=host_budget
    )
    with_it = _seconds(with_chunks, in_bytes, space)
    if with_it is None or (without is not None and without <= with_it):
        return plain
    why = "the budget cannot be reached without it" if without is None else "it is predicted to be faster"
    note = (
        f"Every plan here, the well-known ones included, runs `{name}: chunked_loss` ({head.tokens} tokens at a time), "
        f"because {why}: gradients are equal to plain training's only up to rounding."
    )
    return Settled(fixed, chunked, other_uniform, in_bytes, note)


def chunk_size(tracer: Tracer, head: str, uniform: Uniform) -> ChunkedLoss:
    """The largest chunk of tokens, of a few sizes, whose leanest plan is not worse than with the smallest.

    Larger chunks run faster (fewer, larger products; the weights' gradients are summed up less often), smaller ones
    hold fewer logits: worth having only as long as these are what makes the peak. A handful of ghost runs.
    """
    choices, _ = _leanest(uniform)

    def peak(tokens: int) -> int:
        return tracer.trace({**choices, head: ChunkedLoss(tokens=tokens)}).peak_bytes

    least = peak(CHUNKS[0])
    larger = (tokens for tokens in reversed(CHUNKS[1:]) if peak(tokens) <= least * (1 + WORTH))
    return ChunkedLoss(tokens=next(larger, CHUNKS[0]))


def _leanest(uniform: Uniform) -> tuple[dict[str, Choice], Graph]:
    return min(uniform.values(), key=lambda pair: pair[1].peak_bytes)


def way_out(
    error: InfeasibleError, tracer: Tracer, uniform: Uniform, overhead: int, way: str = "--allow-inexact"
) -> InfeasibleError:
    """The same error; its remedy names the ``way`` to inexact choices where a ghost run shows that they lower the
    smallest peak."""
    if tracer.head is None:
        return error
    choices, graph = _leanest(uniform)
    head = chunk_size(tracer, tracer.head.name, uniform)
    chunked = tracer.trace({**choices, tracer.head.name: head}).peak_bytes
    if chunked >= graph.peak_bytes * (1 - WORTH):
        return error
    remedy = (
        f"{error.remedy} Or add {way}: with `{tracer.head.name}: chunked_loss` the leanest plan needs "
        f"{format_bytes(chunked + overhead)}, with gradients equal up to rounding."
    )
    return InfeasibleError(error.message, remedy=remedy, smallest_peak=error.smallest_peak)


def units_of(units: Sequence[Unit], head: Unit | None, fixed: Mapping[str, Choice]) -> tuple[Unit, ...]:
    """The units that a plan lists: the output head only where it has a choice."""
    return (*units, *([head] if head is not None and head.name in fixed else []))


def nominal(environment: Environment) -> Times:
    """Nominal rates of the kind of device."""
    return lambda uniform: nominal_op_times(environment, leanest(uniform)[1])


def _bytes(profiled: Profiled, budget: Budget, space: SearchSpace) -> int:
    known = known_plans([u.name for u in profiled.blocks], space.choices)
    device = profiled.predictor.device
    smallest = profiled.smallest_peak(known.values())
    return budget.resolve(
        profiled.predictor.predict(known[NONE]).peak_bytes, smallest, device.capacity_bytes - profiled.used_by_others
    )


def _seconds(profiled: Profiled, budget: Budget, space: SearchSpace) -> float | None:
    """Nominal seconds of the solver's plan; None where nothing fits."""
    try:
        foreseen = foresee(profiled, budget, space)
    except InfeasibleError:
        return None
    return profiled.predictor.predict(foreseen.choices).step_seconds
