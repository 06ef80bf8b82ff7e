"""What the output head does in all plans that a search makes: as ever; or softmax, or head and loss, in chunks of rows.

Decided by ghost runs and nominal rates before anything is measured, so that one question always gets one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from autockpt.errors import ConflictError, InfeasibleError
from autockpt.profiling import Needs, Predictor, Profiled, Traces, Uniform, nominal_op_times
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Environment,
    Graph,
    OpTimes,
    SearchSpace,
    Unit,
    format_bytes,
    parse_choice,
)
from autockpt.schema.choices import CHUNKED_LOSS, ChunkedLoss
from autockpt.schema.known import NONE, known_plans
from autockpt.tracing import Tracer

WORTH = 0.01
"""A way out is named, and smaller chunks are taken, where the leanest plan's peak falls by more than this share."""
FASTER = 0.005
"""Of a step: by less, nominal rates cannot tell, and the head stays as it is."""
CHUNKS = (256, 512, 1024, 2048, 4096)
"""Tokens of a chunk: below, products of an output head no longer keep a device busy."""


class FixedTracer:
    """Traces plans with some choices added to each."""

    def __init__(self, tracer: Traces, fixed: Mapping[str, Choice]) -> None:
        self._tracer, self._fixed = tracer, dict(fixed)

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        return self._tracer.trace({**(choices or {}), **self._fixed})


@dataclass(frozen=True)
class Settled:
    """What the search works with: choices that are part of every plan of ours (none, or the head's), and why.

    ``uniform`` has them in all its plans. ``twin``: ghost runs of a shallow model; of the whole one there is then only
    the one in which layers save everything. ``plain``: that with a plain head, where it is another, for op times.
    """

    fixed: Mapping[str, Choice]
    traces: Traces
    uniform: Uniform
    budget: Budget
    note: str = ""
    twin: tuple[Traces, Uniform] | None = None
    plain: Uniform = field(default_factory=dict)

    @property
    def described(self) -> list[str]:
        """The fixed choices in words, for what names a run."""
        return sorted(f"{name}: {choice}" if choice != CHUNKED_LOSS else name for name, choice in self.fixed.items())

    @property
    def layers(self) -> Uniform:
        """The uniform plans that differ by what layers do."""
        return self.uniform if self.twin is None else self.twin[1]

    def with_head(self, name: str, choice: Choice, kinds: Iterable[str]) -> Settled:
        """The same with a choice for the output head in every plan; of the uniform plans, those of ``kinds``.

        Raises ConflictError where the model refuses it.
        """
        fixed = {name: choice}
        if self.twin is None:
            return replace(self, fixed=fixed, uniform=_again(self.traces, self.uniform, kinds, fixed))
        traces, layers = self.twin
        whole = _again(self.traces, self.uniform, [SAVE.kind], fixed)
        return replace(self, fixed=fixed, uniform=whole, twin=(traces, _again(traces, layers, kinds, fixed)))


def _again(traces: Traces, uniform: Uniform, kinds: Iterable[str], fixed: Mapping[str, Choice]) -> Uniform:
    plans = {kind: {**uniform[kind][0], **fixed} for kind in kinds}
    return {kind: (plan, traces.trace(plan)) for kind, plan in plans.items()}


Times = Callable[[Uniform], OpTimes]  # op times that cover these ghost runs


def settle(
    plain: Settled,
    head: Unit | None,
    space: SearchSpace,
    *,
    times: Times,
    room: Callable[[], int],
    profiled: Callable[[], Profiled],
    inexact: bool,
    needs: Needs | None = None,
) -> Settled:
    """Have every plan of ours run the output ``head`` otherwise where that is predicted to be faster, or fits at all.

    ``chunked_softmax`` is tried where the space has it, ``chunked_loss`` where ``inexact`` choices are allowed, each by
    ghost runs of a few uniform plans, between which what layers do is mixed freely to meet the budget. ``times`` are
    good enough for ranking; ``room`` are the device's bytes for this job, ``profiled`` is the profile of the ``plain``
    way. A share of a budget is meant of plans with a plain head, and turned into bytes here.
    """
    if head is None:
        note = "--allow-inexact changes nothing: the model has no output head" if inexact else ""
        return replace(plain, note=note)
    points = _points(plain, times, needs)
    peaks = [peak for peak, _ in points.values()]
    size = plain.budget.resolve(points[SAVE.kind][0], min(peaks), room() if plain.budget.kind == "auto" else 0)
    least = _mixed(points, size)
    if points[SAVE.kind][0] <= size:
        return plain
    leanest = min(points, key=lambda kind: points[kind][0])
    kinds = dict.fromkeys((SAVE.kind, leanest, *(least.kinds if least else ())))
    found, best, smallest = plain, least, min(peaks) * (1 - WORTH)
    for choice in _tried(plain, head, space, inexact):
        try:
            other = plain.with_head(head.name, choice, kinds)
        except ConflictError:
            continue
        points = _points(other, times, needs)
        mixed, peak = _mixed(points, size), min(peak for peak, _ in points.values())
        faster = mixed is not None and (best is None or mixed.seconds < (1 - FASTER) * best.seconds)
        if faster or (mixed is None and best is None and peak < smallest):
            found, best, smallest = other, mixed, min(peak, smallest)
    if found is plain:
        return plain
    choice = found.fixed[head.name]
    found = plain.with_head(head.name, choice, plain.layers)
    return replace(
        found,
        budget=_in_bytes(plain.budget, size, profiled, space),
        note=_note(head, choice, least is None),
        plain={"plain": plain.uniform[SAVE.kind]},
    )


def _tried(plain: Settled, head: Unit, space: SearchSpace, inexact: bool) -> Iterator[Choice]:
    yield from map(parse_choice, space.head)
    if inexact:
        traces, uniform = plain.twin or (plain.traces, plain.uniform)
        with suppress(ConflictError):
            yield chunk_size(traces, head.name, uniform)


def _note(head: Unit, choice: Choice, alone: bool) -> str:
    why = "the budget cannot be reached without it" if alone else "it is predicted to be faster"
    bits = "bit-equal with plain training's" if choice.exact else "equal to plain training's only up to rounding"
    return f"Every plan of ours runs `{head.name}: {choice}`, because {why}: gradients are {bits}."


class _Mixed(NamedTuple):
    """Seconds of the fastest mixture of uniform plans within a budget, and the kinds in it."""

    seconds: float
    kinds: tuple[str, ...]


def _mixed(points: Mapping[str, tuple[int, float]], size: int) -> _Mixed | None:
    """As if peaks and seconds of uniform plans mixed in proportion; None where nothing fits."""
    peaks, seconds = np.array(list(points.values()), dtype=float).T
    share = linprog(seconds, A_ub=[peaks / size], b_ub=[1.0], A_eq=[np.ones_like(peaks)], b_eq=[1.0])
    if not share.success:
        return None
    return _Mixed(float(share.fun), tuple(kind for kind, part in zip(points, share.x, strict=True) if part > 0))


def _points(way: Settled, times: Times, needs: Needs | None) -> dict[str, tuple[int, float]]:
    """Peak bytes and seconds of each uniform plan; where there is a twin, what it says for so many layers."""
    runs = enumerate((way.uniform, way.layers))
    known = times({f"{number} {kind}": pair for number, uniform in runs for kind, pair in uniform.items()})
    whole = Predictor(way.traces.trace, known, needs=needs)
    points = {kind: _point(whole, pair) for kind, pair in way.uniform.items()}
    if way.twin is None:
        return points
    small = Predictor(way.twin[0].trace, known)
    layers = {kind: _point(small, pair) for kind, pair in way.layers.items()}
    (peak, seconds), (least, fewest), deeper = points[SAVE.kind], layers[SAVE.kind], _deeper(way)
    return {
        kind: (peak + round(deeper * (p - least)), seconds + deeper * (s - fewest)) for kind, (p, s) in layers.items()
    }


def _point(predictor: Predictor, run: tuple[dict[str, Choice], Graph]) -> tuple[int, float]:
    said = predictor.learn(*run)
    return said.peak_bytes, said.step_seconds or 0.0


def _deeper(way: Settled) -> float:
    """How many layers the whole model has for each of its twin's."""
    return len(way.uniform[SAVE.kind][1].blocks()) / len(way.layers[SAVE.kind][1].blocks())


def _in_bytes(budget: Budget, size: int, profiled: Callable[[], Profiled], space: SearchSpace) -> Budget:
    """The budget as plans with a plain head have it."""
    if budget.kind in ("bytes", "auto"):
        return budget
    if budget.kind == "activation_share":
        plain = profiled()
        known = known_plans([u.name for u in plain.blocks], space.choices)
        size = budget.resolve(plain.predictor.predict(known[NONE]).peak_bytes, plain.smallest_peak(known.values()), 0)
    return Budget(text=budget.text, kind="bytes", size=size)


def chunk_size(tracer: Traces, head: str, uniform: Uniform) -> ChunkedLoss:
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
    return lambda uniform: nominal_op_times(environment, *(graph for _, graph in uniform.values()))
