"""What would change the answer: batch, length, chunked loss, adapters, sharding; by arithmetic on traced steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autockpt.explaining.holdings import COME_AND_GO, GRADIENTS, LOGITS
from autockpt.page.plans import GHOST
from autockpt.page.tape import Timeline
from autockpt.schema import Plan, ResolvedBudget, format_binary, words
from autockpt.schema.batches import SizesTimed
from autockpt.schema.choices import ChunkedLoss
from autockpt.schema.outlook import Outlook
from autockpt.schema.remedy import Alternative

STATES = "optimizer states"
CHUNKED = "Head and loss in chunks"


@dataclass(frozen=True)
class JobChange:
    """A change of the job, what it would do, how that is known, and how to find out exactly."""

    name: str
    effect: str
    exactly: str
    basis: str = "arithmetic"


def changes(
    outlook: Outlook,
    sizes: SizesTimed | None,
    tapes: Sequence[Timeline],
    settings: Mapping[str, Any],
    budget: ResolvedBudget | None,
    plan: Plan | None,
) -> tuple[JobChange, ...]:
    """Micro-batches that were timed, what the search ghost-ran, then estimates for other changes.

    These are at the peak of the plan's own step, of the plain one where there is no plan; it may move elsewhere.
    """
    found = [*_sizes(sizes), *(_ghost_run(way) for way in outlook.changes)]
    chunked, now = outlook.chunked_peak_bytes, (plan.measured or plan.predicted) if plan is not None else None
    if chunked is not None and now is not None:
        less = now.peak_bytes - chunked
        effect = f"this plan would peak at {format_binary(chunked)}, {format_binary(abs(less))} "
        effect += f"{'less' if less >= 0 else 'more'} (gradients equal up to rounding)"
        found.append(JobChange(CHUNKED, effect, "--allow-inexact", GHOST))
    if not tapes:
        return tuple(found)
    tape = tapes[-1]
    held = dict(tape.held)
    moving = sum(held.get(name, 0) for name in COME_AND_GO)
    spare = budget.bytes - _peak(plan, tape) if budget is not None else None
    if isinstance(batch := settings.get("batch_size"), int) and batch > 0 and moving:
        effect = f"about {format_binary(moving // batch)} more" + _room(spare, moving // batch)
        found.append(JobChange("One more sample in the batch", effect, f"--batch-size {batch + 1}"))
    if isinstance(length := settings.get("seq_len"), int) and length > 0 and moving:
        each = moving // length * 64
        effect = f"about {format_binary(each)} more for 64 tokens, if attention does not keep its scores"
        found.append(JobChange("Longer sequences", effect + _room(spare, each, 64), f"--seq-len {length + 64}"))
    if (logits := held.get(LOGITS, 0)) and chunked is None and not plan_in_chunks(plan):
        effect = f"takes up to {format_binary(logits)} off this moment (gradients equal up to rounding)"
        found.append(JobChange(CHUNKED, effect, "--allow-inexact"))
    trained = held.get(GRADIENTS, 0) + held.get(STATES, 0)
    if trained and not settings.get("lora"):
        effect = f"takes nearly all of {format_binary(trained)} of gradients and optimizer states off this moment"
        found.append(JobChange("Adapters instead of all weights", effect, "--lora 16"))
    held_by_all = trained + held.get("weights", 0)
    spec = plan.workload if plan is not None else None
    if held_by_all and (spec is None or spec.shard is None):
        effect = f"takes about {format_binary(held_by_all // 2)} off, if weights, gradients and states are split"
        only = "" if plan is not None and plan.status == "simulated" else " --hardware NAME"  # no real step follows it
        found.append(JobChange("Sharding over two devices", effect, f"--shard 2{only}"))
    return tuple(found)


def plan_in_chunks(plan: Plan | None) -> bool:
    """Whether head and loss run in chunks already."""
    return plan is not None and any(isinstance(choice, ChunkedLoss) for choice in plan.expand_planned().values())


def _sizes(sizes: SizesTimed | None) -> Iterator[JobChange]:
    """Micro-batches by their updates, timed side by side."""
    for size, times in sizes.times.items() if sizes is not None else ():
        seconds = words.seconds(statistics.median(times))
        best = " — the fastest" if sizes is not None and size == sizes.winner else ""
        best = best or (" — cannot be told from the fastest" if sizes is not None and size in sizes.undecided else "")
        yield JobChange(
            f"Micro-batches of {size}", f"an update takes {seconds}{best}", f"--batch-size {size}", "measured"
        )


def _ghost_run(way: Alternative) -> JobChange:
    """A change that makes a job fit, with its figures."""
    fits = (
        f", {format_binary(way.spare_bytes)} to spare" if way.spare_bytes is not None and way.spare_bytes >= 0 else ""
    )
    effect = f"peak {format_binary(way.peak_bytes)}{fits} with {way.plan}"
    if way.step_seconds is not None:
        effect += f", {words.seconds(way.step_seconds)} a step"
    effect += f", {way.relative_cost:.2f} times the seconds per token of the leanest plan of the job as it is"
    name, _, rest = way.effect.partition(": ")
    return JobChange(name[:1].upper() + name[1:], f"{effect}{f' ({rest})' if rest else ''}", way.options, GHOST)


def _peak(plan: Plan | None, tape: Timeline) -> int:
    said = (plan.measured or plan.predicted) if plan is not None else None
    return said.peak_bytes if said is not None else tape.peak


def _room(spare: int | None, each: int, unit: int = 1) -> str:
    if spare is None or each <= 0:
        return ""
    more = spare // each * unit
    return f"; the headroom holds {more} more" if more > 0 else "; the headroom does not hold it with this plan"
