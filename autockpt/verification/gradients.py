"""Compare losses, gradients, buffers and random states after steps under a plan with plain training's, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import Field

from autockpt.checkpointing.fingerprint import TOLERANCE
from autockpt.schema.base import Data
from autockpt.verification.observation import Observation, stricter_with

_SHOWN = 3


class GradientCheck(Data):
    """How a plan's steps compare with a reference's.

    ``repeatable`` is False where the reference, run twice, did not give the same bits even with deterministic
    algorithms; ``equal`` then means that the plan deviates no more than the reference does from itself.
    """

    equal: bool
    repeatable: bool = True
    deterministic: bool = Field(default=False, description="deterministic algorithms were needed")
    compared: int = Field(default=0, description="losses, gradients, buffers and random states")
    differences: tuple[str, ...] = ()
    deviation: float = Field(default=0.0, description="largest relative difference of two gradient norms")
    tolerance: float | None = Field(
        default=None, description="losses and gradients count as equal within this, relative to their length"
    )
    distance: float = Field(default=0.0, description="largest distance of two losses or gradients, relative as well")

    def describe(
        self, reference: str = "plain training", because: str = "the plan has a choice that is not exact"
    ) -> str:
        """The result in one line. ``because``: why equal up to rounding is all that can be asked."""
        how = " under deterministic algorithms (without them it varies by itself)" if self.deterministic else ""
        if self.tolerance is not None:
            how += f" (distances up to {self.distance:.1e}, tolerance {self.tolerance:.0e})"
        if not self.equal:
            more = f" and {len(self.differences) - _SHOWN} more" if len(self.differences) > _SHOWN else ""
            return (
                f"{len(self.differences)} of {self.compared} values differ from {reference}{how}: "
                f"{', '.join(self.differences[:_SHOWN])}{more}; gradient norms by up to {self.deviation:.1e}"
            )
        if not self.repeatable:
            setting = stricter_with()
            hint = f" (on a GPU it may, with {setting} set before Python starts)" if setting else ""
            return f"{reference} does not repeat itself bit by bit{hint}, and the plan deviates from it no more{how}"
        if self.tolerance is not None:
            return (
                f"equal with {reference} up to rounding, as {because}: losses and gradients of "
                f"two steps{how}; buffers and random states are bit-equal"
            )
        what = f"losses, gradients, buffers and random states of two steps ({self.compared} values)"
        return f"{what} are bit-equal with {reference}{how}"


class Reference(NamedTuple):
    """Two observations of what a plan is compared with, and whether deterministic algorithms were needed."""

    first: Observation
    second: Observation
    deterministic: bool


def observe_reference(observe: Callable[[bool], Observation], again: Callable[[], object] = lambda: None) -> Reference:
    """Observe it twice, and where these differ twice ``again``: ``observe`` is told to use deterministic algorithms."""
    first, second = observe(False), observe(False)
    if not first.differences(second):
        return Reference(first, second, False)
    again()
    return Reference(observe(True), observe(True), True)


def judge(reference: Reference, planned: Observation) -> GradientCheck:
    """The verdict on a plan's observation.

    Sketched losses and gradients may be a little apart; whatever else then differs must vary in the reference, too.
    """
    first, second, deterministic = reference
    varying, differences = set(first.differences(second)), first.differences(planned)
    deviation = first.largest_deviation(planned)
    tolerance, away, excused = None, dict[str, float](), False
    if first.sketches:
        tolerance = max(TOLERANCE[o.coarsest] for o in (first, planned))
        away, by_itself = first.distances(planned), first.distances(second)
        close = {name for name in away if away[name] <= max(tolerance, 4 * by_itself[name])}
        differences = [name for name in differences if name not in close | (varying - away.keys())]
    elif varying:
        excused = set(differences) <= varying and deviation <= 4 * first.largest_deviation(second)
    return GradientCheck(
        equal=not differences or excused,
        repeatable=tolerance is not None or not varying,
        deterministic=deterministic,
        compared=len(first.digests),
        differences=tuple(differences),
        deviation=deviation,
        tolerance=tolerance,
        distance=max(away.values(), default=0.0),
    )
