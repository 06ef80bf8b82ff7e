"""Plans for compiled steps as a few numbers: some layers at the front do one thing, those behind them another.

What a layer keeps at the front of the model is held longest, so that is where the leaner choice belongs. ``Split`` is a
plan in three numbers; what splits cost that were not measured is read off the line between two that were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autockpt.schema import RECOMPUTE, SAVE, Choice, CompileMode, SearchSpace
from autockpt.schema.choices import CompileBudget
from autockpt.schema.space import Knob
from autockpt.tuning.study import Parameters

GRID = 0.05
"""Fractions are multiples of this: each is compiled anew, and finer ones seldom save other tensors."""
RUNS_AGAIN, SAVES = 0.0, 1.0


@dataclass(frozen=True, order=True)
class Split:
    """The first ``count`` layers keep ``lean`` of what the compiler would save, the others ``rich``.

    0 stands for recompute, 1 for save, between them lie shares of the compiler's memory budget.
    """

    lean: float
    rich: float
    count: int

    @classmethod
    def of(cls, lean: float, rich: float, count: int, layers: int) -> Split:
        """The one way to write this plan."""
        lean, rich = on_grid(lean), on_grid(rich)
        if count <= 0 or lean == rich:
            return cls(rich, rich, 0)
        return cls(lean, lean, 0) if count >= layers else cls(lean, rich, count)

    def choices(self, layers: Sequence[str]) -> dict[str, Choice]:
        """The plan. As one graph has one budget, with compile: model ``lean`` is 0 or equals ``rich``."""
        return {name: option(self.lean if i < self.count else self.rich) for i, name in enumerate(layers)}

    @property
    def parameters(self) -> Parameters:
        return {"lean": self.lean, "rich": self.rich, "count": self.count}

    def __str__(self) -> str:
        rest = named(self.rich)
        return f"first {self.count} {named(self.lean)}, then {rest}" if self.count else rest


@dataclass(frozen=True)
class Cost:
    """What a plan's measured step takes."""

    peak_bytes: int
    seconds: float


Known = Mapping[Split, Cost]


def on_grid(fraction: float) -> float:
    return round(round(min(max(fraction, 0.0), 1.0) / GRID) * GRID, 4)


def option(fraction: float) -> Choice:
    """The choice that keeps this share."""
    if fraction <= RUNS_AGAIN:
        return RECOMPUTE
    return SAVE if fraction >= SAVES else CompileBudget(fraction=fraction)


def named(fraction: float) -> str:
    """The choice that keeps this share, in words."""
    choice = option(fraction)
    return f"budget {fraction:g}" if isinstance(choice, CompileBudget) else choice.kind


def fraction(choice: Choice) -> float | None:
    """The share that a choice keeps; None for one that is not about shares."""
    if isinstance(choice, CompileBudget):
        return choice.fraction
    return {"save": SAVES, "recompute": RUNS_AGAIN}.get(choice.kind)


def space(mode: CompileMode) -> SearchSpace:
    """What the sampler varies: the share of layers at the front, and what they and the others keep."""
    knobs = {"rich": Knob(low=0.05, high=1.0), "front": Knob(low=0.0, high=1.0)}
    if mode == "layers":
        knobs["lean"] = Knob(low=0.0, high=1.0)
    # not the eager solver's knobs, which is all that a space in a file may have
    return SearchSpace.model_construct(name="compiled", encoding="knobs", sampler="tpe", knobs=knobs)


def from_knobs(
    parameters: Mapping[str, float | int | str], mode: CompileMode, layers: int, *, shares: bool = True
) -> Split:
    """A sampler's point as a plan: ``front`` is a share of the layers, ``rich`` and ``lean`` are fractions.

    Without ``shares`` (budgets are refused) each fraction is taken for the nearer of recompute and save.
    """
    lean = float(parameters["lean"]) if mode == "layers" else RUNS_AGAIN
    rich, count = float(parameters["rich"]), round(float(parameters["front"]) * layers)
    if not shares:
        lean, rich = float(round(lean)), float(round(rich))
    if lean > rich and count > 0:  # the leaner of the two comes first
        lean, rich = rich, lean
    return Split.of(lean, rich, count, layers)


def to_knobs(split: Split, mode: CompileMode, layers: int) -> Parameters:
    """A plan as a sampler's point."""
    point: Parameters = {"rich": split.rich, "front": split.count / layers}
    return point | ({"lean": split.lean} if mode == "layers" else {})


def estimate(known: Known, split: Split, layers: int) -> Cost | None:
    """What the plan should cost by the nearest measured ones with the same two choices; None where these are not known.

    Linear between them, which whole layers are about. Never beyond them.
    """
    line = {
        count: cost
        for count in range(layers + 1)
        if (cost := known.get(Split.of(split.lean, split.rich, count, layers))) is not None
    }
    below = max((count for count in line if count <= split.count), default=None)
    above = min((count for count in line if count >= split.count), default=None)
    if below is None or above is None:
        return None
    share = (split.count - below) / (above - below) if above > below else 0.0
    first, last = line[below], line[above]
    peak = first.peak_bytes + share * (last.peak_bytes - first.peak_bytes)
    return Cost(round(peak), first.seconds + share * (last.seconds - first.seconds))


def proposals(known: Known, budget: int, mode: CompileMode, layers: int) -> list[Split]:
    """Plans that were not measured, should fit and be faster than the best measured one that does; fastest first.

    Of every two fractions that were measured for all layers alike, the one with the fewest lean layers that should fit.
    """
    uniform = sorted({split.rich for split in known if split.count == 0})
    best = min((cost.seconds for cost in known.values() if cost.peak_bytes <= budget), default=float("inf"))
    found: dict[Split, float] = {}
    for lean in uniform if mode == "layers" else [f for f in uniform if f == RUNS_AGAIN]:
        for rich in (f for f in uniform if f > lean):
            for count in range(1, layers):
                split = Split(lean, rich, count)
                cost = estimate(known, split, layers)
                if cost is not None and cost.peak_bytes <= budget:
                    if split not in known and cost.seconds < best:
                        found[split] = cost.seconds
                    break
    return sorted(found, key=lambda split: (found[split], split))
