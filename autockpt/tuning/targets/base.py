"""What a target is: the device, or the simulation of one, on which a search evaluates plans.

A search knows its target by this interface alone. To evaluate plans on something else, add a subclass next to this file
and name it in ``target_of`` (tuning/search.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from autockpt.cost import CostModel, local_memory, simulated_memory
from autockpt.schema import SAVE, Choice, Environment, Graph, SearchRequest, SearchSpace, Trial
from autockpt.schema.names import fold
from autockpt.schema.plan import NEVER_CALLED
from autockpt.tuning.traced_model import TracedModel, less_than_asked
from autockpt.tuning.trials import AS_FAST, NAMED, Candidate, Plans, Result, Trials, preferred

CHECKS = 8
"""Ghost runs that refine one candidate, at most."""


@dataclass(frozen=True)
class Prepared:
    """A request whose step was traced: its budget and search space are limited to what device and model support.

    ``request`` has notes on what was limited. ``settings`` are those of the traced workload, ``seeds`` are plans to try
    early, by name, ``traced`` has the ghost runs.
    """

    request: SearchRequest
    settings: Mapping[str, Any]
    seeds: Plans
    environment: Environment
    traced: TracedModel
    used_by_others: int = 0

    @classmethod
    def of(
        cls,
        request: SearchRequest,
        traced: TracedModel,
        environment: Environment,
        notes: Sequence[str] = (),
        used_by_others: int = 0,
        **settings: Any,
    ) -> Self:
        """Combine the request with what was traced; ``notes`` and ``settings`` are the target's.

        Raises PlanError where the plan to start from is another model's.
        """
        seeds, doubts = _seeds(request, traced)
        own = traced.tracer.settings
        if request.step is not None:  # its own settings, with the units that the ghost run found
            own = {**request.step.settings, **{k: v for k, v in own.items() if k in ("units", NEVER_CALLED)}}
        budget, less = request.budget, less_than_asked(request.budget, environment)
        if less and request.hardware is not None:
            budget = budget.model_copy(update={"size": environment.device.capacity_bytes})
        notes = (*request.notes, *traced.all_notes, *less, *notes, *doubts)
        asked = request.model_copy(update={"budget": budget, "space": traced.space, "notes": notes})
        return cls(asked, {**own, **settings}, seeds, environment, traced, used_by_others)

    @property
    def workload_key(self) -> str:
        """The key of the workload's op times in their cache."""
        spec = self.request.workload
        described = spec.model_dump(mode="json") if spec is not None else dict(self.settings)
        return json.dumps([described, self.request.name], default=str)

    def bytes_needed(self, graph: Graph) -> int:
        """Bytes of the device that a ghost run needs, the device's own overhead included."""
        hardware = self.request.hardware
        return (local_memory(self.environment) if hardware is None else simulated_memory(hardware))(graph)


@dataclass
class Target:
    """Traces the step, builds the cost model, evaluates candidates and chooses the winner, in this order.

    Whether it takes real steps, the ``request`` says. ``notes`` are shown to the user with the answer.
    """

    request: SearchRequest
    notes: list[str] = field(default_factory=list, init=False)

    def trace(self, stack: ExitStack) -> Prepared:
        """Ghost-run the request's step; ``stack`` closes what later ghost runs need. Raises UsageError."""
        raise NotImplementedError

    def cost_model(self, prepared: Prepared) -> CostModel | None:
        """The cost model of choices; None where steps can only be measured."""
        raise NotImplementedError

    def evaluate(self, candidate: Candidate, budget_bytes: int | None) -> Result:
        """Try a plan, under ``budget_bytes`` as a limit where the device enforces one. Raises TimeLimitReached."""
        raise NotImplementedError

    def reserved(self, trials: Trials, baselines: Sequence[Trial]) -> float:
        """Seconds of the time limit that are kept for ``winner``."""
        return 0.0

    def winner(self, trials: Trials, baselines: Sequence[Trial], seconds: float) -> Trial | None:
        """The trial whose plan is the answer; None where none fits the budget.

        ``baselines`` are trials to time with the best plans; ``seconds`` are left to do so.
        """
        if not (fitting := trials.ranking()):
            return None
        named = preferred(fitting, {t.number: t.score_seconds for t in fitting}, trials.budget_bytes or 0)
        if named.number != fitting[0].number:
            close = f"Trial #{named.number} is as fast as #{fitting[0].number}, within {AS_FAST:.1%}"
            self.notes.append(f"{close}: {NAMED}.")
        return named


def _seeds(request: SearchRequest, traced: TracedModel) -> tuple[dict[str, dict[str, Choice]], tuple[str, ...]]:
    """The plan to start from, with choices for units that are planned for, and a note on what was left out."""
    plan, tracer = request.start, traced.tracer
    if plan is None:
        return {}, ()
    blocks = [u.name for u in tracer.units if u.role == "block"]
    chosen = {n: c for n, c in plan.choices_for(tracer.units, tracer.head).items() if c != SAVE}
    forbidden = {*SearchSpace().choices} - {*traced.space.choices}  # what a search tries unless it may not, or cannot
    inexact = request.allow_inexact or request.compile is not None
    kept = {n: c for n, c in chosen.items() if n in blocks and c.kind not in forbidden and (c.exact or inexact)}
    kept = {n: c for n, c in kept.items() if traced.space.gathered or not c.gathered}
    kept |= {n: c for n, c in chosen.items() if c in traced.heads}
    left_out = ", ".join(fold({n: c for n, c in chosen.items() if n not in kept}))
    notes = (f"Left out of the plan to start from, as this search does not try it: {left_out}.",) if left_out else ()
    return {f"{plan.status} plan": {**dict.fromkeys(blocks, SAVE), **kept}}, notes
