"""The target of ``autockpt search --compile``: real steps that are compiled first.

Candidates are only measured, never predicted: ghost runs and op times see eager ops, not what a compiler makes of them.
Compiling may fail and takes most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autockpt.devices import get_device
from autockpt.errors import ConflictError, MeasurementError, TimeLimitReached, UsageError
from autockpt.measuring.compiler import missing
from autockpt.schema import SearchRequest, Trial
from autockpt.schema.choices import SearchSpace
from autockpt.tracing import Tracer
from autockpt.tuning.finals import first_rounds
from autockpt.tuning.targets.base import Prepared
from autockpt.tuning.targets.measured import FINALS_SHARE, Measured, saving_everything
from autockpt.tuning.trials import Candidate, Result, Trials

IN_GRAPHS = ("save", "recompute", "selective")
"""Choices that can be part of a compiled graph, besides compile_budget."""
NOT_PREDICTED = (
    "Compiled steps are only measured: ghost runs and op times see eager ops, not what a compiler makes of them, so "
    "nothing is predicted (and a search without --compile offers more choices)."
)
_COMPILING = {
    "layers": "The first plan with a choice compiles a layer for it, which takes a while; what comes later finds it.",
    "model": "Every plan is compiled as a whole, which takes a while; later runs find it.",
}


@dataclass
class Compiled(Measured):
    """Measures compiled steps; ``request.compile`` says what is compiled."""

    refuses_budgets: bool = field(default=False, init=False)

    def allowed(self, tracer: Tracer) -> tuple[SearchSpace, tuple[str, ...]]:
        """The choices that can be part of a graph. Raises UsageError where the request cannot be compiled."""
        if self.request.compile == "layers" and tracer.settings.get("units"):
            raise UsageError(
                f"layers are compiled by blocks that repeat, and {tracer.settings['units']} are none",
                remedy="Search with --compile model, or without --compile; leave `units` out where blocks repeat.",
            )
        space = self.request.space
        inside = tuple(kind for kind in space.choices if kind in IN_GRAPHS)
        if "recompute" not in inside:
            raise UsageError("without recompute there is nothing to choose in compiled steps", remedy="Allow it.")
        outside = [kind for kind in space.choices if kind not in IN_GRAPHS]
        left_out = (f"not part of a compiled graph, so left out: {', '.join(outside)}",) if outside else ()
        return space.restricted(inside), (*left_out, NOT_PREDICTED)

    def cost_model(self, prepared: Prepared) -> None:
        """There is none. Tells the user what takes long."""
        self.clock.listener.note(_COMPILING[self.request.compile or "layers"])

    def evaluate(self, candidate: Candidate, budget_bytes: int | None) -> Result:
        """Measure a plan. It has failed where the compiler refuses it."""
        try:
            return super().evaluate(candidate, budget_bytes)
        except TimeLimitReached:
            raise
        except (ConflictError, MeasurementError) as error:
            on_budgets = any(choice.kind == "compile_budget" for choice in candidate.choices.values())
            if isinstance(error, ConflictError) and on_budgets and not self.refuses_budgets:
                self.refuses_budgets = True
                self.notes.append(f"No compile_budget for this model: {error.message}")
            return Result("failed", message=error.message)

    def reserved(self, trials: Trials, baselines: Sequence[Trial]) -> float:
        """The time of the finals, in which plans of an earlier run are compiled again; 0 before the two first plans."""
        if self.clock.timeout is None or len(trials.all) < 2:  # they define a relative budget
            return 0.0
        contest = [*self._finalists(trials), *saving_everything(baselines)]
        compiling = sum(t.measured.compile_seconds for t in contest if t.measured and t.number < trials.resumed)
        return min(first_rounds(contest) * 2 + compiling, FINALS_SHARE * self.clock.timeout)


def refuse_uncompilable(request: SearchRequest) -> None:
    """Raises UsageError where nothing can be compiled here, or the request contradicts compiling."""
    if why := missing(get_device(request.device).kind):
        raise UsageError(f"steps cannot be compiled here: {why}", remedy="Install it, or leave out --compile.")
    for given, option in (
        (request.hardware is not None, "--hardware"),
        (request.allow_inexact, "--allow-inexact"),
        (request.host_budget is not None, "--host-budget"),
    ):
        if given:
            raise UsageError(
                f"--compile and {option} do not go together: compiled steps can only be measured, and neither "
                "offloading nor a loss in chunks can be part of a graph",
                remedy=f"Leave out {option} or --compile.",
            )
