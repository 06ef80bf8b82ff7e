"""Search by compiled steps (``autockpt search --compile``).

Candidates are only measured, never predicted. Each is compiled first, which may fail and takes most of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from autockpt.cost import used_by_others
from autockpt.devices import get_device
from autockpt.errors import ConflictError, MeasurementError, TimeLimitReached, UsageError
from autockpt.measuring.compiled import missing
from autockpt.schema import CompileMode, SearchRequest, Trial
from autockpt.tracing import Tracer
from autockpt.tuning.finals import first_rounds
from autockpt.tuning.opening import traced
from autockpt.tuning.targets.base import Prepared
from autockpt.tuning.targets.measured import FINALISTS, FINALS_SHARE, Measured, in_finals
from autockpt.tuning.trials import Candidate, Score, Trials

IN_GRAPHS = ("save", "recompute", "selective")
"""Choices that can be part of a compiled graph, compile_budget besides."""
NOT_PREDICTED = (
    "compiled steps are only measured: ghost runs and op times see eager ops, not what a compiler makes of them, so "
    "nothing is predicted (and a search without --compile offers more choices)"
)
LATELY = 3
"""So many plans before it say how long the next one takes to compile and measure."""
_COMPILING = {
    "layers": "The first plan with a choice compiles a layer for it, which takes a while; what comes later finds it.",
    "model": "Every plan is compiled as a whole, which takes a while; later runs find it.",
}


@dataclass(kw_only=True)
class Compiled(Measured):
    """Real steps by a measurer that compiles as ``mode`` says."""

    mode: CompileMode
    refuses_budgets: bool = False
    _took: list[float] = field(default_factory=list)  # seconds per plan, compiling included

    def trace(self, stack: ExitStack) -> Prepared:
        """Raises UsageError where the request contradicts compiling."""
        request, clock = self.request, self.clock
        with clock.stage("trace"):
            device = get_device(request.device).torch_device
            tracer = stack.enter_context(Tracer.from_spec(request.described, device=device))
            if self.mode == "layers" and tracer.settings.get("units"):
                raise UsageError(
                    f"layers are compiled by blocks that repeat, and {tracer.settings['units']} are none",
                    remedy="Search with --compile model, or without --compile; leave `units` out where blocks repeat.",
                )
            inside = tuple(kind for kind in request.space.choices if kind in IN_GRAPHS)
            if "recompute" not in inside:
                raise UsageError("without recompute there is nothing to choose in compiled steps", remedy="Allow it.")
            found = traced(tracer, request.space.restricted(inside), listener=clock.listener)
        outside = [kind for kind in request.space.choices if kind not in IN_GRAPHS]
        left_out = (f"not part of a compiled graph, so left out: {', '.join(outside)}",) if outside else ()
        return Prepared.of(request, found, self.opened(stack), [*left_out, NOT_PREDICTED], compile=self.mode)

    def cost_model(self, prepared: Prepared, trials: Trials) -> None:
        """None: nothing is known of compiled steps but what they take. Says what takes long."""
        self.clock.listener.note(_COMPILING[self.mode])

    def room(self) -> int:
        """Bytes of the device that others do not hold."""
        return self.measurer.environment.device.capacity_bytes - used_by_others(self.measurer)

    @property
    def device_kind(self) -> str:
        return self.measurer.environment.device.kind

    def score(self, candidate: Candidate, budget_bytes: int | None) -> Score:
        """Measure a plan; one that the compiler refuses failed."""
        began = self.clock.elapsed
        try:
            return super().score(candidate, budget_bytes)
        except TimeLimitReached:
            raise
        except (ConflictError, MeasurementError) as error:
            on_budgets = any(choice.kind == "compile_budget" for choice in candidate.choices.values())
            if isinstance(error, ConflictError) and on_budgets and not self.refuses_budgets:
                self.refuses_budgets = True
                self.notes.append(f"no compile_budget for this model: {error.message}")
            return Score("failed", message=error.message)
        finally:
            self._took.append(self.clock.elapsed - began)

    def reserved(self, trials: Trials, known: Sequence[Trial]) -> float:
        """What the next plan takes, and then the finals; nothing before the two plans that say what a budget is."""
        if self.clock.timeout is None or not self._took or len(trials.all) < 2:
            return 0.0
        contest = [*trials.ranking()[:FINALISTS], *in_finals(known)]
        anew = sum(t.measured.compile_seconds for t in contest if t.measured and t.number < trials.resumed)
        finals = min(first_rounds(contest) * 2 + anew, FINALS_SHARE * self.clock.timeout)
        return finals + statistics.median(self._took[-LATELY:])


def refuse_uncompilable(request: SearchRequest) -> None:
    """Raises UsageError where nothing can be compiled here, or the request contradicts compiling."""
    if why := missing(get_device(request.device).kind):
        raise UsageError(f"steps cannot be compiled here: {why}", remedy="Install it, or leave out --compile.")
    for given, option in (
        (request.hardware is not None, "--hardware"),
        (request.dry_run, "--dry-run"),
        (request.allow_inexact, "--allow-inexact"),
        (request.host_budget is not None, "--host-budget"),
    ):
        if given:
            raise UsageError(
                f"--compile and {option} do not go together: compiled steps can only be measured, and neither "
                "offloading nor a loss in chunks can be part of a graph",
                remedy=f"Leave out {option} or --compile.",
            )
