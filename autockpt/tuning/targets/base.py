"""The interface of a target: what a search asks of the device, or the simulation, that steps run on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from autockpt.cost import CostModel, local_memory, simulated_memory
from autockpt.schema import SAVE, Choice, Environment, Graph, Plan, PlanStatus, SearchRequest, Trial
from autockpt.schema.plan import NEVER_CALLED
from autockpt.tuning.traced_model import TracedModel, less_than_asked
from autockpt.tuning.trials import AS_FAST, NAMED, Candidate, Plans, Score, Trials, preferred


@dataclass
class Scoring:
    """What a target's numbers are good for, and how much work a candidate is worth.

    ``source`` says what its numbers are; while it does not know ``knows_seconds``, they rank plans and are shown to
    nobody. ``checks`` are the ghost runs that may be spent on refining one candidate.
    """

    source: PlanStatus = "measured"
    knows_seconds: bool = True
    checks: int = 8

    @property
    def measures(self) -> bool:
        """Whether candidates take real steps. Simulated costs are what the solver takes them for, so that its refined
        plan is what any other candidate would come to: a simulation tries one, and learns nothing from it."""
        return self.source == "measured"


@dataclass(frozen=True)
class Prepared:
    """The traced request: budget and search space limited to what the device and model support.

    ``request`` has notes on what was limited. ``settings`` are those of the traced workload, ``seeds`` plans to try
    early, by name, and ``found`` the ghost runs.
    """

    request: SearchRequest
    settings: Mapping[str, Any]
    seeds: Plans
    environment: Environment
    found: TracedModel
    used_by_others: int = 0

    @classmethod
    def of(
        cls,
        request: SearchRequest,
        found: TracedModel,
        environment: Environment,
        notes: Sequence[str] = (),
        used_by_others: int = 0,
        **settings: Any,
    ) -> Self:
        """With what became known of the workload; ``notes`` and ``settings`` are the target's.

        Raises PlanError for another model's plan to start from.
        """
        seeds, doubts = _seeds(request.start, found)
        own = found.tracer.settings
        if request.step is not None:  # what it is known by, with what its ghost run found of its units
            own = {**request.step.settings, **{k: v for k, v in own.items() if k in ("units", NEVER_CALLED)}}
        budget, less = request.budget, less_than_asked(request.budget, environment)
        if less and request.hardware is not None:
            budget = budget.model_copy(update={"size": environment.device.capacity_bytes})
        notes = (*request.notes, *found.all_notes, *less, *notes, *doubts)
        asked = request.model_copy(update={"budget": budget, "space": found.space, "notes": notes})
        return cls(asked, {**own, **settings}, seeds, environment, found, used_by_others)

    @property
    def workload_key(self) -> str:
        """What op times other than those of single ops depend on, and are filed under."""
        spec = self.request.workload
        described = spec.model_dump(mode="json") if spec is not None else dict(self.settings)
        return json.dumps([described, self.request.name], default=str)

    def needs(self, graph: Graph) -> int:
        """Bytes of the device that a ghost run takes, its own overhead included."""
        hardware = self.request.hardware
        return (local_memory(self.environment) if hardware is None else simulated_memory(hardware))(graph)


@dataclass(kw_only=True)
class Target:
    """Where candidates are evaluated: trace the step, build the cost model, score candidates, choose the winner.

    ``scoring`` say how far its numbers can be trusted; ``notes`` are shown to the user.
    """

    scoring: Scoring = field(default_factory=Scoring)
    notes: list[str] = field(default_factory=list)

    def trace(self, stack: ExitStack) -> Prepared:
        """Ghost-run the request; ``stack`` keeps open what later ghost runs need. Raises UsageError."""
        raise NotImplementedError

    def cost_model(self, prepared: Prepared) -> CostModel | None:
        """The cost model of choices; None where steps can only be measured."""
        raise NotImplementedError

    def score(self, candidate: Candidate, budget_bytes: int | None) -> Score:
        """Judge a plan. ``budget_bytes``: a limit to hold where the device has one. Raises TimeLimitReached."""
        raise NotImplementedError

    def reserved(self, trials: Trials, known: Sequence[Trial]) -> float:
        """Seconds of the time limit in which no further plan is begun."""
        return 0.0

    def winner(self, trials: Trials, known: Sequence[Trial], seconds: float) -> Trial | None:
        """The plan to name, of those that fit; None where none holds the budget.

        ``known`` are the trials of well-known plans, to time with the best; ``seconds`` are left to do so.
        """
        if not (fitting := trials.ranking()):
            return None
        named = preferred(fitting, {t.number: t.score_seconds for t in fitting}, trials.budget_bytes or 0)
        if named.number != fitting[0].number:
            close = f"Trial #{named.number} is as fast as #{fitting[0].number}, within {AS_FAST:.1%}"
            self.notes.append(f"{close}: {NAMED}.")
        return named


def _seeds(plan: Plan | None, found: TracedModel) -> tuple[dict[str, dict[str, Choice]], tuple[str, ...]]:
    """The plan to start from, with choices for units that are planned for, and a note on what was left out."""
    tracer, heads = found.tracer, found.heads
    if plan is None:
        return {}, ()
    blocks = [u.name for u in tracer.units if u.role == "block"]
    chosen = {n: c for n, c in plan.choices_for(tracer.units, tracer.head).items() if c != SAVE}
    kept = {n: c for n, c in chosen.items() if n in blocks or (heads and n == heads.unit.name and c in heads.graphs)}
    left_out = sorted(set(chosen) - set(kept))
    notes = (f"Of the plan to start from, {', '.join(left_out)} was left out.",) if left_out else ()
    return {f"{plan.status} plan": {**dict.fromkeys(blocks, SAVE), **kept}}, notes
