"""Search micro-batch, accumulation and plan together for the most tokens per second. The rows of an update stay.

Larger micro-batches keep a device busier and leave less memory to save activations in. Tokens per second have one
summit over the sizes. The climb begins at the largest size that fits with everything saved; every size gets a search of
its own, and the best one the trials that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from autockpt.cost import uniform_graphs
from autockpt.devices import get_device
from autockpt.errors import InfeasibleError, TimeLimitReached, UsageError
from autockpt.measuring import environment_of
from autockpt.measuring.environment import environment_to_measure_in, environment_without_context
from autockpt.measuring.local import refuse_many_processes
from autockpt.schema import Listener, SearchOutcome, SearchRequest, WorkloadSpec
from autockpt.schema.batches import BatchAnswer, BatchSetting
from autockpt.schema.known import OURS
from autockpt.schema.words import tally
from autockpt.tuning.alternatives import WhatIf, on_device, predictions
from autockpt.tuning.jobs import largest_that_fits, tracer_of, with_rows
from autockpt.tuning.opening import blocks_of
from autockpt.tuning.question import Clock
from autockpt.tuning.record import save_plan_copy
from autockpt.tuning.rows import dependent_rows
from autockpt.tuning.search import run_search
from autockpt.tuning.targets.simulated import on_hardware

FEWEST = 3  # candidates of the first search of a size
LAST = 0.15  # share of the time limit with less than which no further search is begun: tracing alone takes that
APART = 0.02  # share of an update's time by which simulated settings must differ to be told apart
KINDS = ("save", "recompute", "recompute_offload", "offload")
Search = Callable[[SearchRequest, Listener | None], SearchOutcome]
SizeSearch = Callable[[int, int, float | None], SearchOutcome]
"""The search of a micro-batch: its size, candidates, seconds left. It goes on where an earlier one ended."""


@dataclass
class Climb:
    """Searches of single sizes, and what came of them. The ``clock``'s time limit is for all of them.

    ``skipped`` are sizes that were to be searched when too little of it was left.
    """

    rows: int
    search: SizeSearch
    clock: Clock
    found: dict[int, SearchOutcome | None] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def at(self, size: int, trials: int) -> BatchSetting | None:
        """The best plan of a micro-batch; None where nothing fits. A size searched before is searched on."""
        limit = self.clock.timeout or 0.0
        left = self.clock.seconds_left
        if left < limit * LAST and any(self.found.values()):
            self.skipped.add(size)
            return self.best(size)
        self.clock.listener.note(f"micro-batch {size} × {self.rows // size}: up to {trials} candidates")
        try:
            outcome = self.search(size, trials, None if left == math.inf else max(1.0, left))
            if outcome.interrupted:  # its run keeps what was measured
                raise KeyboardInterrupt
            self.found[size] = outcome
        except InfeasibleError:
            if not any(self.found.values()) and size == 1:
                raise
            self.found[size] = None
        except TimeLimitReached:
            if not any(self.found.values()):
                raise
            self.skipped.add(size)
        return self.best(size)

    def best(self, size: int) -> BatchSetting | None:
        """What a search of this size found."""
        outcome = self.found.get(size)
        return None if outcome is None or outcome.plan is None else setting(size, self.rows, outcome)

    def left_out(self) -> str:
        """Which sizes there was no time for, in words; empty where there was for all."""
        sizes = sorted(self.skipped - set(self.found))
        if not sizes:
            return ""
        return (
            f"The time limit of {self.clock.timeout:g} s left none for micro-batches of {', '.join(map(str, sizes))}: "
            "with more of it they may turn out faster."
        )

    def open(self, size: int) -> bool:
        """Whether more candidates could bring more: not where saving everything fits, nor where a simulation ended."""
        outcome = self.found.get(size)
        return outcome is not None and outcome.binding and outcome.source == "measured"

    @property
    def spent(self) -> int:
        """Candidates so far, of all sizes."""
        return sum(candidates(o) for o in self.found.values() if o is not None)


def search_batch_sizes(request: SearchRequest, listener: Listener, search: Search = run_search) -> BatchAnswer:
    """The micro-batch, accumulation and plan with the most tokens per second, for ``request.rows_per_update`` rows.

    A live step's batch is cut to fewer rows, or repeated for more. All sizes share ``request.trials`` and
    ``request.timeout``. The answer is in ``outcome.plan.settings``, as ``batch_size`` and ``accumulate``. Raises
    UsageError for a batch that does not divide, a budget that is a share of the job's own peak, or a model whose rows
    depend on each other; InfeasibleError where not even single rows fit; KeyboardInterrupt after Ctrl-C; else what
    ``run_search`` does, which ``search`` stands for.
    """
    _refuse(request)
    asked = request
    with ExitStack() as stack:
        if request.out is None:  # kept even where nothing of the run is: a size is searched on where it was
            asked = request.model_copy(update={"out": Path(stack.enter_context(TemporaryDirectory()))})

        def at(size: int, trials: int, left: float | None) -> SearchOutcome:
            more = {"trials": trials, "timeout": left, "plan_out": None}
            return search(of_size(asked, size).model_copy(update=more), listener)

        climb = Climb(request.rows_per_update or 0, at, Clock(listener, request.timeout))
        answer = _most_tokens(climb, partial(of_size, asked), what_if_of(asked), request.trials)
    return answer.model_copy(update={"outcome": save_plan_copy(request, answer.outcome)})


def of_size(request: SearchRequest, size: int) -> SearchRequest:
    """The same update in micro-batches of ``size``. Raises UsageError for a batch that cannot be divided."""
    rows, step = request.rows_per_update or 0, request.step
    if request.workload is not None:
        sized = {"batch_size": size, "accumulate": max(1, rows // size)}
        return request.model_copy(update={"workload": request.workload.model_copy(update=sized)})
    made = with_rows(step, size, max(1, rows // size))
    if made is None:
        raise UsageError(
            "this batch cannot be divided into rows: its tensors do not all begin with as many of them, or the step is "
            "a full_step of its own",
            remedy="Give autockpt.Step(model, batch) whose tensors are (rows, …), or search without global_batch=.",
        )
    return request.model_copy(update={"step": made})


def _most_tokens(climb: Climb, job: Callable[[int], SearchRequest], what_if: WhatIf, trials: int) -> BatchAnswer:
    """Climb the sizes, and search on where it may bring more. ``job`` is the update in micro-batches of a size."""
    rows, listener = climb.rows, climb.clock.listener
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    listener.stage("ghost-run batch sizes")
    met = dependent_rows(job, what_if)
    listener.advance()
    known = ghost_run_sizes(job, what_if, sizes, listener)
    share = max(FEWEST, trials // 4)
    top = climbed(climb, known, share, trials)
    if (left := trials - climb.spent) > 0 and climb.open(top):
        climb.at(top, share + left)
    found = {s: (b, o) for s, o in climb.found.items() if o is not None and (b := climb.best(s)) is not None}
    top = min(found, key=lambda size: found[size][0].update_seconds)
    said = ""
    settings = [best for best, _ in found.values()]
    best, outcome = found[top]
    if outcome.source == "simulated":
        alike = [s for s in settings if s is not best and s.update_seconds <= (1 + APART) * best.update_seconds]
        if alike:
            others = ", ".join(f"{s.batch_size} × {s.accumulate} ({s.plan})" for s in alike)
            said = f"As fast within {APART:.0%}, and closer than that a simulation does not tell: {others}."
    tokens = outcome.settings.get("tokens") is not None
    return BatchAnswer(
        rows_per_update=rows,
        unit="tokens" if tokens else "rows",
        best=best,
        others=tuple(sorted((s for s in settings if s is not best), key=lambda b: b.update_seconds)),
        outcome=outcome,
        trials=sum(o.measured_trials for o in climb.found.values() if o is not None),
        seconds=climb.clock.elapsed,
        notes=(*met, *filter(None, [said, climb.left_out()]), *NOTES),
    )


@dataclass
class Sizes:
    """What ghost runs say of micro-batches: ``peaks`` of uniform plans, which ``look`` finds for a size when asked."""

    sizes: list[int]
    budget_bytes: int
    peaks: dict[int, dict[str, int]]
    look: Callable[[int], dict[str, int]]

    def largest(self, *kinds: str) -> int | None:
        """The largest micro-batch that fits with one of these choices on every layer; None where none does."""

        def fits(size: int) -> bool:
            if size not in self.peaks:
                self.peaks[size] = self.look(size)
            return any(self.peaks[size].get(kind, math.inf) <= self.budget_bytes for kind in kinds)

        return largest_that_fits(self.sizes[::-1], fits)


def ghost_run_sizes(
    job: Callable[[int], SearchRequest], what_if: WhatIf, sizes: list[int], listener: Listener
) -> Sizes:
    """Sizes that are ghost-run with one choice on every layer when they are asked about."""

    def look(size: int) -> dict[str, int]:
        with tracer_of(job(size), what_if.device) as tracer:
            uniform = uniform_graphs(tracer, blocks_of(tracer), what_if.kinds)
            listener.advance()
            return {kind: said.peak_bytes for kind, said in predictions(what_if, uniform).items()}

    return Sizes(sizes, what_if.budget_bytes, {}, look)


def climbed(climb: Climb, known: Sizes, trials: int, most: int) -> int:
    """The size at the summit: up from the largest that saves everything, else down. Each gets ``trials`` candidates.

    Upwards one worse size is passed over: plans change from size to size, and may gain more at the next. No size is
    begun once ``most`` candidates are spent. Raises InfeasibleError where not even the smallest fits.
    """
    sizes, highest = known.sizes, known.largest(*KINDS)
    begin = known.largest("save") or sizes[0]
    while (best := climb.at(begin, trials)) is None:  # its ghost runs were too hopeful
        begin = sizes[sizes.index(begin) - 1]
    top = begin
    above = [s for s in sizes if begin < s <= (highest or begin)]
    below = [s for s in reversed(sizes) if s < begin]
    for direction, patience in ((above, 1), (below, 0)):
        for size in direction if top == begin else ():
            if climb.spent >= most or (found := climb.at(size, trials)) is None:
                break
            if found.update_seconds <= best.update_seconds:
                top, best = size, found
            elif patience == 0:
                break
            else:
                patience -= 1
    return top


def what_if_of(request: SearchRequest) -> WhatIf:
    """What micro-batches are judged by, on the device or simulated."""
    kinds = [kind for kind in KINDS if kind in ("save", *request.space.choices)]  # that all layers may have alike
    if request.hardware is not None:
        return on_hardware(request, request.hardware, kinds)
    if request.workload is None:
        device = get_device(str(request.step.device))
        environment = environment_of(device)
    else:
        device = get_device(request.device)
        environment = environment_without_context(request.device) or environment_to_measure_in(request.device)
    return on_device(request.budget, device.torch_device, environment, device.used_by_others(), kinds)


def _refuse(request: SearchRequest) -> None:
    """Refuse what has no answer."""
    refuse_many_processes()
    rows, of = request.rows_per_update or 0, request.workload or request.step
    request.budget.refuse_share("differs by batch size")
    given = of.batch_size if isinstance(of, WorkloadSpec) else of.settings.get("batch_size")
    if of.accumulate != 1 and of.accumulate * (given or 0) != rows:
        raise UsageError(
            f"--accumulate {of.accumulate} with {given} rows a batch is not {rows} rows per update",
            remedy="Leave --accumulate out: it is what the search decides.",
        )
    if request.dry_run and request.hardware is None:
        raise UsageError(
            "a dry run knows no step times to choose a batch by",
            remedy="Leave --dry-run out, or simulate with --hardware.",
        )


def setting(size: int, rows: int, outcome: SearchOutcome) -> BatchSetting:
    """The plan that a search found as a setting of the update."""
    chosen = outcome.rows[-1]
    score = chosen.measured or chosen.predicted
    plan = chosen.name if outcome.plan is None else tally(outcome.plan.expand_planned())
    work = outcome.settings.get("tokens") or rows
    assert score is not None and isinstance(work, (int, float))
    return BatchSetting(batch_size=size, accumulate=rows // size, plan=plan, score=score, work=work)


def candidates(outcome: SearchOutcome) -> int:
    """How many of its trials were candidates, not well-known plans."""
    return max(0, outcome.measured_trials - sum(row.name != OURS for row in outcome.rows))


NOTES = (
    "The rows of an update stay the same: its gradient is summed in another order, so it is equal up to rounding.",
    "Where rows hold different numbers of labels, a mean over them weights micro-batches otherwise than one whole "
    "batch does. transformers' Trainer puts that right; in a loop of your own with a causal language model count the "
    "labels of all micro-batches first, n = sum(b['labels'][:, 1:].ne(-100).sum() for b in micro_batches), and take "
    "model(**b, num_items_in_batch=n).loss, not divided by the accumulation.",
)
