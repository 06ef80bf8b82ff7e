"""Search micro-batch, accumulation and plan together for the most tokens per second. The rows of an update stay.

Larger micro-batches keep a device busier and leave less memory for activations, so tokens per second have one maximum
over the sizes. Hill climbing begins at the largest size that fits with everything saved. Every size gets a search of
its own, and the best one the trials that are left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from autockpt.errors import AutockptError, InfeasibleError, TimeLimitReached, UsageError
from autockpt.measuring.local import refuse_many_processes
from autockpt.schema import Graph, Listener, Op, SearchOutcome, SearchRequest, WorkloadSpec
from autockpt.schema.baselines import OURS
from autockpt.schema.request import BatchAnswer, BatchSetting
from autockpt.schema.words import tally
from autockpt.tuning.clock import LAST_START, Clock
from autockpt.tuning.job_sizes import LEAN_KINDS, job_of, largest_that_fits, least_bytes, what_if_of
from autockpt.tuning.search import FEWEST, run_search, save_plan_copy
from autockpt.tuning.traced_model import kinds_of, tracer_of

APART = 0.02  # share of an update's time by which simulated settings must differ to be distinguished
SizeSearch = Callable[[int, int, float | None], SearchOutcome]
"""Searches one micro-batch size: (size, candidates, seconds left). A second search of a size continues the first."""


def search_batch_sizes(request: SearchRequest, listener: Listener) -> BatchAnswer:
    """The micro-batch, accumulation and plan with the most tokens per second, for ``request.rows_per_update`` rows.

    A live step's batch is cut to fewer rows, or repeated for more. All sizes share ``request.trials`` and
    ``request.timeout``. The answer is in ``outcome.plan.settings``, as ``batch_size`` and ``accumulate``. Raises
    UsageError for a batch that does not divide, a budget that is a share of the job's own peak, or a model whose rows
    depend on each other; InfeasibleError where not even single rows fit; KeyboardInterrupt after Ctrl-C; else what
    ``run_search`` does.
    """
    refuse_many_processes()
    request.budget.refuse_share("differs by batch size")
    rows, share = request.rows_per_update or 0, max(FEWEST, request.trials // 4)
    of = request.workload or request.step
    given = of.batch_size if isinstance(of, WorkloadSpec) else of.settings.get("batch_size")
    if of.accumulate != 1 and of.accumulate * (given or 0) != rows:
        raise UsageError(
            f"--accumulate {of.accumulate} with {given} rows a batch is not {rows} rows per update",
            remedy="Leave --accumulate out: it is what the search decides.",
        )
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    with ExitStack() as stack:  # runs are always kept, so that a second search of a size continues
        out = request.out or Path(stack.enter_context(TemporaryDirectory()))

        def job(size: int) -> SearchRequest:
            return job_of(request, batch_size=size, accumulate=max(1, rows // size))

        def at(size: int, trials: int, left: float | None) -> SearchOutcome:
            asked = {"out": out, "trials": trials, "timeout": left, "plan_out": None}
            return run_search(job(size).model_copy(update=asked), listener)

        def largest(*kinds: str) -> int:
            needed = partial(least_bytes, job, what_if, kinds)
            return largest_that_fits(sizes, needed, what_if.budget_bytes) or sizes[0]

        climb = Climb(rows, at, Clock(listener, request.timeout))
        listener.stage("ghost-run batch sizes")
        what_if = what_if_of(request, kinds_of(request.space, request.allow_inexact))
        refuse_dependent_rows(job)
        top = climb.summit(sizes, largest("save"), largest(*LEAN_KINDS), share, request.trials)
        left, found = request.trials - climb.spent, climb.found[top]
        # if saving everything fits, or in a simulation, more candidates cannot help
        if left > 0 and found is not None and found.binding and found.source == "measured":
            climb.at(top, share + left)
    answer = climb.answer()
    return answer.model_copy(update={"outcome": save_plan_copy(request, answer.outcome)})


@dataclass
class Climb:
    """Hill climbing over sizes by a search of each. The ``clock``'s time limit is for all of them.

    ``skipped`` are sizes for which too little of it was left.
    """

    rows: int
    search: SizeSearch
    clock: Clock
    found: dict[int, SearchOutcome | None] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def summit(self, sizes: Sequence[int], begin: int, highest: int, trials: int, most: int) -> int:
        """The best size, looked for upwards from ``begin``, else downwards. Each gets ``trials`` candidates.

        Upwards one worse size is skipped, as another plan may gain more at the next one. No size is begun once ``most``
        candidates are spent. Raises InfeasibleError where not even the smallest fits.
        """
        while (best := self.at(begin, trials)) is None:  # its ghost runs were too optimistic
            begin = sizes[sizes.index(begin) - 1]
        top = begin
        above = [size for size in sizes if begin < size <= highest]
        below = [size for size in reversed(sizes) if size < begin]
        for direction, patience in ((above, 1), (below, 0)):
            for size in direction if top == begin else ():
                if self.spent >= most or (found := self.at(size, trials)) is None:
                    break
                if found.update_seconds <= best.update_seconds:
                    top, best = size, found
                elif patience == 0:
                    break
                else:
                    patience -= 1
        return top

    def at(self, size: int, trials: int) -> BatchSetting | None:
        """The best plan of a micro-batch size; None where nothing fits. An earlier search of it is continued."""
        if (known := any(self.found.values())) and self.clock.passed(LAST_START):
            self.skipped.add(size)
            return self.best(size)
        self.clock.listener.note(f"micro-batch {size} × {self.rows // size}: up to {trials} candidates")
        try:
            outcome = self.search(size, trials, self.clock.timeout_of(1.0))
            if outcome.interrupted:  # its run keeps what was measured
                raise KeyboardInterrupt
            self.found[size] = outcome
        except InfeasibleError:
            if not known and size == 1:
                raise
            self.found[size] = None
        except TimeLimitReached:
            if not known:
                raise
            self.skipped.add(size)
        return self.best(size)

    def best(self, size: int) -> BatchSetting | None:
        """The result of the search of this size."""
        outcome = self.found.get(size)
        return None if outcome is None or outcome.plan is None else batch_setting(size, self.rows, outcome)

    @property
    def spent(self) -> int:
        """Candidates so far, of all sizes, baselines not among them."""
        known = filter(None, self.found.values())
        return sum(max(0, o.measured_trials - sum(row.name != OURS for row in o.rows)) for o in known)

    def answer(self) -> BatchAnswer:
        """The best setting before the others."""
        settings = sorted(filter(None, map(self.best, self.found)), key=lambda setting: setting.update_seconds)
        best, *others = settings
        outcome, messages = self.found[best.batch_size], list[str]()
        assert outcome is not None
        alike = [s for s in others if s.update_seconds <= (1 + APART) * best.update_seconds]
        if outcome.source == "simulated" and alike:
            listed = ", ".join(f"{s.batch_size} × {s.accumulate} ({s.plan})" for s in alike)
            messages.append(f"As fast within {APART * 100:.0f} %, which a simulation cannot distinguish: {listed}.")
        if late := sorted(self.skipped - set(self.found)):
            messages.append(
                f"The time limit of {self.clock.timeout:g} s left none for micro-batches of "
                f"{', '.join(map(str, late))}: with more of it they may turn out faster."
            )
        return BatchAnswer(
            rows_per_update=self.rows,
            unit="tokens" if outcome.settings.get("tokens") is not None else "rows",
            best=best,
            others=tuple(others),
            outcome=outcome,
            trials=sum(o.measured_trials for o in filter(None, self.found.values())),
            seconds=self.clock.elapsed,
            notes=(*messages, *NOTES),
        )


def batch_setting(size: int, rows: int, outcome: SearchOutcome) -> BatchSetting:
    """The result of the search of a size as a setting."""
    chosen = outcome.rows[-1]
    score = chosen.measured or chosen.predicted
    plan = chosen.name if outcome.plan is None else tally(outcome.plan.expand_planned())
    work = outcome.settings.get("tokens") or rows
    assert score is not None and isinstance(work, (int, float))
    return BatchSetting(batch_size=size, accumulate=rows // size, plan=plan, score=score, work=work)


NOTES = (
    "The rows of an update stay the same: its gradient is summed in another order, so it is equal up to rounding. "
    "Losses that balance experts are taken over a micro-batch, so they change with its size.",
    "Where rows hold different numbers of labels, a mean over them weights micro-batches otherwise than one whole "
    "batch does. transformers' Trainer puts that right; in a loop of your own with a causal language model count the "
    "labels of all micro-batches first, n = sum(b['labels'][:, 1:].ne(-100).sum() for b in micro_batches), and take "
    "model(**b, num_items_in_batch=n).loss, not divided by the accumulation.",
)


# -- rows that depend on each other -----------------------------------------------------------------------------------

SIZES = (2, 3)
"""Rows of the two ghost runs. Not 1, as single rows are broadcast and batch norms refuse them."""


def refuse_dependent_rows(job: Callable[[int], SearchRequest]) -> None:
    """Raises UsageError where the rows of a batch depend on each other, so that another micro-batch trains differently.

    Two batch sizes are ghost-run. An op of the forward whose output grows with the square of the rows compares rows, as
    contrastive losses do. A batch norm that returns the statistics of its batch combines them. A model that cannot be
    ghost-run at these sizes passes.
    """
    graphs = list[Graph]()
    with suppress(AutockptError):
        for size in SIZES:
            with tracer_of(job(size), fallback=False) as tracer:
                graphs.append(tracer.trace())
    if len(graphs) == len(SIZES) and (where := next(meetings(*graphs), "")):
        raise UsageError(
            f"the rows of this model's batch depend on each other ({where}): another micro-batch is another training",
            remedy="Keep the batch size as it is, and search without a global batch.",
        )


def meetings(small: Graph, large: Graph) -> Iterator[str]:
    """Ops that combine several rows, with their modules, found in the traced steps of ``SIZES`` rows."""
    few, many = SIZES
    others = dict(_numbered(large))
    for key, op in _numbered(small):
        counts, more = _elements(op), _elements(others[key]) if key in others else []
        squared = any(one * many**2 == two * few**2 for one, two in zip(counts, more, strict=False))
        if squared or ("batch_norm" in op.target and len(op.outputs) > 1 and math.prod(op.outputs[1].shape) > 0):
            name = op.target.removeprefix("aten.").partition(".")[0]
            yield f"{name} in {op.module}" if op.module else name


def _numbered(graph: Graph) -> Iterator[tuple[tuple[str, str, int], Op]]:
    """The ops of the forward, by module, name and how often that name occurred there before."""
    before = Counter[tuple[str, str]]()
    for op in graph.ops:
        if op.phase == "forward":
            name = (op.module, op.target)
            before[name] += 1
            yield (*name, before[name]), op


def _elements(op: Op) -> list[int]:
    """The number of elements of each floating tensor that the op returns, without empty ones."""
    return [count for made in op.outputs if "f" in made.dtype and (count := math.prod(made.shape))]
