"""The Explanation: where the bytes of a step go, and what freeing some would cost. Terminal and page render it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pydantic import Field

from autockpt.schema.base import Data, Facts
from autockpt.schema.choices import Choice
from autockpt.schema.graph import Phase, Span
from autockpt.schema.plan import PlanStatus
from autockpt.schema.sizes import ResolvedBudget

Basis = Literal["measured", "modelled", "nominal"]
"""What seconds rest on: ops timed on the device; a roofline of a named device; rates of common hardware."""


class Holding(Data):
    """Bytes that serve one purpose: at the peak, and the most of them at any moment of the cycle."""

    name: str
    peak_bytes: int
    most_bytes: int


class Slice(Data):
    """A part of the activations and transients that are alive at the peak. Bytes of each of ``count``."""

    name: str
    bytes: int
    count: int = 1

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.bytes * self.count


class Alive(Data):
    """Storages alive at the peak that are alike: same op, place within the unit, shape and size."""

    op: str = Field(description="name of the op that made them: mm, native_layer_norm, …")
    place: str = Field(description="module, without the unit's own name in front where there is a unit")
    units: str = Field(description="folded names of the units; empty for the rest of the model")
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = Field(description="of each")
    count: int = 1
    purpose: str = Field(description="the Holding that they are part of")

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.bytes * self.count


class Curve(Data):
    """Device bytes through the cycle, in equal runs of ops: at the op of each run where they are the most.

    ``growing`` are gradients and the optimizer's own, ``transient`` activations and all other transient ones; the rest
    of ``total`` is there when the cycle begins.
    """

    total: tuple[int, ...]
    growing: tuple[int, ...]
    transient: tuple[int, ...]
    ops: int
    spans: tuple[Span, ...]
    peak_op: int
    peak_target: str = ""
    peak_phase: Phase = "forward"
    peak_module: str = ""


def resampled(values: Sequence[int], columns: int) -> list[int]:
    """The index of the largest value of each of ``columns`` equal runs; repeated where there are fewer values."""
    if not values:
        return []
    bounds = pairwise(column * len(values) // columns for column in range(columns + 1))
    return [max(range(first, max(first + 1, last)), key=values.__getitem__) for first, last in bounds]


class Moment(Data):
    """An op, and the largest transient storages that are alive then.

    The op of the peak; or where nothing is transient at the peak (it lies in the optimizer step), the op at which
    that is the most.
    """

    op: int
    alive: tuple[Alive, ...]
    other_bytes: int = Field(default=0, description="of smaller ones, not listed")
    other_count: int = 0


class Bargain(Data):
    """One choice on one kind of unit: bytes kept until its backward against seconds per cycle over saving."""

    choice: Choice
    kept_bytes: int
    extra_seconds: float
    taken: int = Field(default=0, description="units of this kind that the plan gives this choice")
    hides: bool = Field(default=False, description="the plan hides its copies behind compute, so it costs less")


class Front(Data):
    """The Pareto front of the choices for one kind of unit, most bytes first, and the choices that the plan took."""

    units: str = Field(description="folded names")
    count: int
    bargains: tuple[Bargain, ...]


class Reach(Data):
    """A plan in numbers: simulated peak, the device's own overhead included, and seconds of a cycle."""

    peak_bytes: int
    step_seconds: float
    overhead: float | None = Field(description="share of step time over saving everything; None where that is nothing")
    choices: dict[str, Choice]


class Why(Data):
    """The plan among its neighbours: the nearest one that needs less, and the nearest one that is faster."""

    chosen: Reach
    best: Reach | None = Field(default=None, description="the solver's plan for the same bytes, where it is faster")
    leaner: Reach | None = None
    faster: Reach | None = None


class BudgetRow(Data):
    """What a budget buys. ``reach`` None: nothing fits."""

    budget_bytes: int
    reach: Reach | None
    ours: bool = Field(default=False, description="the budget that was asked for")


class Speed(Data):
    """How fast the explained step is. ``model_flops`` leave out recomputation, ``flops`` do not."""

    seconds: float
    flops: int
    model_flops: int
    peak_flops: float | None = Field(default=None, description="of the device, FLOP/s; None: not described")
    tokens: int | None = None

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs utilisation (Chowdhery et al.: PaLM, 2022): the model's own FLOPs, of what the peak could do."""
        return None if self.peak_flops is None else self.model_flops / self.seconds / self.peak_flops


class Explanation(Data):
    """The whole answer. Bytes are simulated by ghost runs; what seconds rest on is ``basis``."""

    model: str
    settings: Facts = Field(default_factory=dict)
    device: str
    plan: str = Field(description="what is explained, in words")
    status: PlanStatus = "unmeasured"
    choices: dict[str, Choice]
    source: Literal["ghost", "recorded"] = "ghost"
    basis: Basis
    basis_note: str = ""
    budget: ResolvedBudget | None = None
    peak_bytes: int
    save_all_peak: int
    smallest_peak: int
    measured_peak: int | None = None
    measured_seconds: float | None = None
    holdings: tuple[Holding, ...] = Field(description="peak_bytes add up to the peak")
    units: tuple[Slice, ...] = Field(description="what comes and goes at the moment, by unit")
    curve: Curve
    moment: Moment
    fronts: tuple[Front, ...] = ()
    why: Why | None = None
    speed: Speed | None = None
    step_note: str = Field(default="", description="known error of simulated steps, and what they leave out")
    budgets: tuple[BudgetRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the explained plan is within the budget that was asked for."""
        return self.budget is None or self.peak_bytes <= self.budget.bytes
