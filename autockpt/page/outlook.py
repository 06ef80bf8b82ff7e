"""What would change the answer: micro-batches that were timed, and changes of the job that the search ghost-ran."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autockpt.page.plans import GHOST
from autockpt.schema import Plan, format_binary, words
from autockpt.schema.batches import SizesTimed
from autockpt.schema.outlook import Outlook
from autockpt.schema.remedy import INEXACT, Alternative, batch

CHUNKED = "Head and loss in chunks"


@dataclass(frozen=True)
class JobChange:
    """A change of the job, what it would do, how that is known, and the settings to change."""

    name: str
    effect: str
    options: str
    basis: str


def changes(
    outlook: Outlook, sizes: SizesTimed | None, settings: Mapping[str, Any], plan: Plan | None
) -> tuple[JobChange, ...]:
    """Micro-batches that were timed, then what the search ghost-ran."""
    rows = (settings.get("batch_size") or 1) * (settings.get("accumulate") or 1)
    found = [*_sizes(sizes, rows), *(_ghost_run(way) for way in outlook.changes)]
    chunked, now = outlook.chunked_peak_bytes, (plan.measured or plan.predicted) if plan is not None else None
    if chunked is not None and now is not None:
        less = now.peak_bytes - chunked
        effect = f"this plan would peak at {format_binary(chunked)}, {format_binary(abs(less))} "
        effect += f"{'less' if less >= 0 else 'more'} (gradients equal up to rounding)"
        found.append(JobChange(CHUNKED, effect, INEXACT, GHOST))
    return tuple(found)


def _sizes(sizes: SizesTimed | None, rows: int) -> Iterator[JobChange]:
    """Micro-batches by their updates of so many rows, timed side by side."""
    if sizes is None:
        return
    undecided = dict.fromkeys(sizes.undecided, " — cannot be distinguished from the fastest")
    said = undecided | {sizes.winner: " — the fastest"}
    for size, times in sizes.times.items():
        effect = f"an update takes {words.seconds(statistics.median(times))}{said.get(size, '')}"
        yield JobChange(f"Micro-batches of {size}", effect, batch(size, rows // size), "measured")


def _ghost_run(way: Alternative) -> JobChange:
    """A change that makes a job fit, with its figures."""
    spare = way.spare_bytes
    fits = f", {format_binary(spare)} to spare" if spare is not None and spare >= 0 else ""
    effect = f"peak {format_binary(way.peak_bytes)}{fits} with {way.plan}"
    if way.step_seconds is not None:
        effect += f", {words.seconds(way.step_seconds)} a step"
    effect += f", {way.relative_cost:.2f} times the seconds per token of the leanest plan of the job as it is"
    name, _, rest = way.effect.partition(": ")
    return JobChange(name[:1].upper() + name[1:], f"{effect}{f' ({rest})' if rest else ''}", way.options, GHOST)
