"""What helps after an OOM: a plan for the very device that failed; where none fits, changes of the job that would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autockpt.diagnose.question import DiagnoseRequest
from autockpt.errors import InfeasibleError
from autockpt.schema import Choice, SearchOutcome, SearchRequest, Unit, WorkloadSpec, parse_choice
from autockpt.schema.diagnosis import Room
from autockpt.schema.hardware import Hardware
from autockpt.schema.remedy import Alternative
from autockpt.tuning.question import Clock
from autockpt.tuning.search import search_described
from autockpt.tuning.stages import save_plan_copy
from search_spaces.spaces import load_space

SPACE = "knobs"


@dataclass(frozen=True)
class Prescription:
    """What helps: an outcome with a plan, or the alternatives and the least peak that any plan reaches, in bytes."""

    outcome: SearchOutcome | None = None
    alternatives: tuple[Alternative, ...] = ()
    smallest_peak: int | None = None


def prescribe(
    question: DiagnoseRequest, spec: WorkloadSpec, hardware: Hardware, room: Room, clock: Clock
) -> Prescription:
    """The plan for a room, all by ghost runs and modelled seconds, saved where the question wants it.

    Peaks are what the allocator is simulated to reserve. Raises UsageError for a model without blocks, PlanError where
    the plan cannot be written.
    """
    request = SearchRequest(
        budget=room.for_plans,
        workload=spec,
        space=load_space(SPACE),
        hardware=hardware,
        plan_out=question.plan_out,
        dry_run=True,
    )
    try:
        outcome = save_plan_copy(request, search_described(request, clock))
    except InfeasibleError as error:
        return Prescription(alternatives=error.alternatives, smallest_peak=error.smallest_peak)
    return Prescription(outcome=outcome, smallest_peak=outcome.smallest_peak)


def as_run(units: Iterable[Unit], *, recompute: bool) -> Mapping[str, Choice]:
    """The choices that the failed run had: none, or every block recomputed."""
    return {u.name: parse_choice("recompute") for u in units if recompute and u.role == "block"}
