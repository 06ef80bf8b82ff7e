"""Search one plan for sequences of all lengths: which lengths get choices of their own, and what that gains.

The longest batch is searched first, because its choices fit every other. Shorter batches need less recomputation, so a
set of choices for all batches up to a length saves what these would recompute. Costs at lengths that were not searched
are interpolated linearly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autockpt.errors import TimeLimitReached, UsageError
from autockpt.measuring.local import refuse_many_processes
from autockpt.policies.offload import MOVING
from autockpt.runtime.session import compiled_as
from autockpt.schema import Comparison, Listener, Plan, SearchOutcome, SearchRequest, words
from autockpt.schema.baselines import NONE
from autockpt.schema.choices import SAVE
from autockpt.schema.lengths import Lengths
from autockpt.schema.plan import When
from autockpt.schema.run_directory import RunDirectory
from autockpt.tuning.clock import LAST_START, Clock
from autockpt.tuning.job_sizes import resized
from autockpt.tuning.search import FEWEST, run_search, save_plan_copy
from autockpt.workload.lengths import shortened
from autockpt.workload.units import discover_units

MOST_SETS = 4
WORTH = 0.01
"""Share by which a further set must make the expected step faster, so that the gain is not mere noise."""


@dataclass
class Expected:
    """The expected step time over batches, whose ``shares`` are by padded length.

    ``plans`` are the plans found so far, by padded length. Seconds are measured where steps were, else simulated.
    Between searched lengths they are interpolated linearly, through zero at zero.
    """

    shares: Mapping[int, float]
    plans: dict[int, Plan] = field(default_factory=dict)

    def plain_seconds(self, length: float) -> float:
        """Step seconds of plain training with a batch of this length."""
        known = {n: seconds for n, plan in self.plans.items() if (seconds := _seconds(plan)[0]) > 0}
        return _at(length, known.items()) if known else length

    def overhead(self, length: float) -> float:
        """The relative overhead of the best plan for a length; 0 while saving everything fits."""
        known = [(n, _overhead(plan)) for n, plan in self.plans.items()]
        return _at(length, [(self.saves_up_to, 0.0), *known])

    @property
    def saves_up_to(self) -> float:
        """The length up to which saving everything fits, interpolated from peaks; 0 where that is unknown."""
        fits = max((n for n, plan in self.plans.items() if _saves(plan)), default=0)
        plain = {n: _plain(self.plans[n]) for n in sorted(self.plans) if n >= fits}
        peaks = {n: score.peak_bytes for n, row in plain.items() if row and (score := row.predicted or row.measured)}
        budget = self.plans[max(self.plans)].budget
        if budget is None or len(peaks) < 2:
            return fits
        (one, first), (two, second) = [*peaks.items()][:2]
        if second <= first:
            return fits
        return max(fits, min(one + (budget.bytes - first) * (two - one) / (second - first), two - 1))

    def seconds(self, bounds: Sequence[int]) -> float:
        """The expected step seconds if batches up to each of ``bounds`` use the plan for that length."""
        bounds = sorted(bounds)
        overheads = {bound: self.overhead(bound) for bound in bounds}
        return sum(
            share * self.plain_seconds(length) * (1 + overheads[bounds[bisect_left(bounds, length)]])
            for length, share in self.shares.items()
        )

    def best(self, among: Iterable[int]) -> list[int]:
        """The bounds with the least expected step; each further one makes that faster by ``WORTH`` at least.

        The longest is always one; others are ``among`` these.
        """
        bounds = [max(self.shares)]
        while len(bounds) < MOST_SETS:
            tried = {n: self.seconds([*bounds, n]) for n in among if n not in bounds}
            added = min(tried, key=lambda n: (tried[n], n), default=None)
            if added is None or tried[added] > self.seconds(bounds) * (1 - WORTH):
                break
            bounds.append(added)
        return sorted(bounds)


def _at(length: float, known: Iterable[tuple[float, float]]) -> float:
    """The value at a length, interpolated linearly between the ``known`` ones and zero at zero."""
    points = {0.0: 0.0, **dict(known)}
    lengths = sorted(points)
    return float(np.interp(length, lengths, [points[n] for n in lengths]))


def search_lengths(request: SearchRequest, listener: Listener) -> SearchOutcome:
    """A plan for batches of all lengths, none of which breaks the budget. Each length is a search with its own run.

    Sequences longer than ``request.workload.seq_len`` count as cut off there; a live step's batch is as long as the
    longest and is cut for the others. The outcome is that of the longest, with the plan that holds all sets; it takes
    the place of that run's own plan. The longest gets half of ``request.trials``; all lengths share
    ``request.timeout``, of which each gets half of what is left. Raises UsageError for a batch without rows or that
    cannot be cut, InfeasibleError where the longest fits no plan, and what ``run_search`` raises.
    """
    request, lengths = _prepared(request, listener)
    spec, step = request.workload, request.step
    outcomes, plans, longest = dict[int, SearchOutcome](), dict[int, Plan](), lengths.longest
    clock = Clock(listener, request.timeout, request.training_steps)

    def search_at(length: int, trials: int) -> None:
        listener.note(f"batches padded to {length:,} tokens: up to {trials} candidates")
        sized = {"step": shortened(step, length)} if spec is None else {"workload": resized(spec, seq_len=length)}
        limits = {"trials": trials, "timeout": clock.timeout_of(0.5)}
        asked = request.model_copy(update={**sized, **limits, "plan_out": None})
        try:
            outcome = run_search(asked, listener)
        except TimeLimitReached:
            if not plans:
                raise
            return
        clock.limit_by(row.measured for row in outcome.rows)
        if outcome.plan is None or outcome.interrupted:
            raise KeyboardInterrupt
        outcomes[length], plans[length] = outcome, outcome.plan

    search_at(longest, max(FEWEST, request.trials // 2))
    rows = plans[longest].settings.get("batch_size")
    if not isinstance(rows, int):
        raise UsageError("these batches have no rows of tokens", remedy="Search without lengths.")
    shares = lengths.batches(rows)
    expected = Expected(shares, plans)
    if not _saves(plans[longest]) and len(shares) > 1 and not clock.passed(LAST_START):
        share = max(FEWEST, request.trials // (2 * MOST_SETS))
        search_at(min(sorted(set(shares) - {longest}), key=lambda n: abs(n - longest / 2)), share)
        for length in expected.best(shares):
            if length not in plans and not clock.passed(LAST_START):
                search_at(length, share)
    found = outcomes[longest]
    plan, path, gains = plans[longest], found.plan_path, [_single_set_note(expected)]
    if len(bounds := expected.best(plans)) > 1:
        plan, gains = _with_sets(expected, bounds, lengths, rows)
        if found.run_directory is not None:
            path = RunDirectory.open(found.run_directory).write_plan(plan)
    notes = list(found.notes)
    if len(outcomes) > 1:
        spent, took = sum(outcome.measured_trials for outcome in outcomes.values()), words.seconds(clock.elapsed)
        notes.append(f"The trials listed are those of the longest; {spent} of {len(outcomes)} lengths, in {took}.")
    update = {"plan": plan, "plan_path": path, "notes": (*notes, *gains)}
    return save_plan_copy(request, found.model_copy(update=update))


def _prepared(request: SearchRequest, listener: Listener) -> tuple[SearchRequest, Lengths]:
    """The request with the choices that several sets may have, and its lengths, cut to the longest of the job.

    Raises UsageError for requests that have no lengths.
    """
    spec, step, lengths = request.workload, request.step, request.lengths
    assert lengths is not None
    if not request.others_wait:
        refuse_many_processes()
    request.budget.refuse_share("differs by length")
    if spec is not None:
        if spec.packed or request.compile == "model":
            why = "with it all batches have one length" if spec.packed else "that is another question"
            raise UsageError(
                f"lengths and {'packed' if spec.packed else 'compile model'} do not go together: {why}",
                remedy="Leave one of the two out.",
            )
        lengths = lengths if spec.seq_len is None else lengths.cut(spec.seq_len)
        compiled = request.compile is not None
    else:
        compiled = compiled_as(step.model, [unit.name for unit in discover_units(step.model)]) == "layers"
    if compiled and (moving := [kind for kind in request.space.choices if kind in MOVING]):  # refused in several sets
        listener.note(f"layers are compiled, so sets by length leave out {' and '.join(moving)}")
        request = request.model_copy(update={"space": request.space.without(moving)})
    return request, lengths


def _with_sets(expected: Expected, bounds: Sequence[int], lengths: Lengths, rows: int) -> tuple[Plan, list[str]]:
    """The plan with a set of choices for all batches up to each of ``bounds``, and notes on what its sets gain.

    Where attention may keep something for every pair of tokens (all but flash attention) a set's longest sequence is
    bounded as well as its tokens.
    """
    plans, found = expected.plans, list[Plan]()
    scores = not str(plans[bounds[-1]].settings.get("attention")).startswith("flash")
    for below, bound in pairwise([0, *bounds]):
        when = When(tokens=rows * bound, longest=bound if scores else None)
        here = sum(share for length, share in expected.shares.items() if below < length <= bound)
        found.append(plans[bound].model_copy(update={"when": when, "share": round(min(here, 1.0), 4)}))
    alone, together = expected.seconds(bounds[-1:]), expected.seconds(bounds)
    status = "measured" if all(p.status == "measured" for p in found) else "simulated"
    notes = [
        f"Over {lengths}, {rows} to a batch, a step takes {words.seconds(together)} on average with these "
        f"{len(bounds)} sets, {words.seconds(alone)} with the plan for the longest alone "
        f"({words.share(together / alone - 1, signed=True)}): predicted from {status} steps at "
        f"{words.counted(len(plans), 'length')}, on lines between these."
    ]
    if lengths.of == "rows" and rows > 1:
        notes.append("Rows are assumed to be drawn at random; grouping them by length makes shorter batches.")
    combined = found[-1].with_smaller(found[:-1])
    return combined.model_copy(update={"notes": (*combined.notes, *notes)}), notes


def _single_set_note(expected: Expected) -> str:
    longest = max(expected.shares)
    if _saves(expected.plans[longest]):
        return "Saving everything fits the longest batch, so lengths do not matter."
    if len(expected.plans) == 1 and len(expected.shares) > 1:
        return "One set of choices for all lengths: no time was left to search others than the longest."
    return (
        f"One set of choices for all lengths: no further one would make the average step {words.share(WORTH)} faster "
        f"(the longest is {longest:,} tokens)."
    )


def _saves(plan: Plan) -> bool:
    return all(choice == SAVE for choice in plan.expand_planned().values())


def _plain(plan: Plan) -> Comparison | None:
    """The plain step that a plan was compared with."""
    return next((row for row in plan.baselines if row.name == NONE), None)


def _seconds(plan: Plan) -> tuple[float, float]:
    """Seconds of the plain step and of the plan's, both measured or both predicted; 0 where unknown."""
    if (none := _plain(plan)) is None:
        own = plan.measured or plan.predicted
        seconds = (own.step_seconds if own is not None else None) or 0.0
        return (seconds, seconds) if _saves(plan) else (0.0, seconds)
    if none.measured is not None and plan.measured is not None:
        return none.measured.step_seconds, plan.measured.step_seconds
    if none.predicted is not None and plan.predicted is not None:
        return none.predicted.step_seconds or 0.0, plan.predicted.step_seconds or 0.0
    return 0.0, 0.0


def _overhead(plan: Plan) -> float:
    plain, ours = _seconds(plan)
    return max(0.0, ours / plain - 1) if plain > 0 and not _saves(plan) else 0.0
