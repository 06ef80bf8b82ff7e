"""Errors for a budget that no plan fits: the least that any plan needs, and what would make the job fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autockpt.cost import CostModel, uniform_graphs
from autockpt.errors import InfeasibleError
from autockpt.schema import ResolvedBudget, SearchRequest, format_bytes
from autockpt.schema.choices import ChunkedLoss
from autockpt.schema.outlook import SMALLER, Alternative, Outlook
from autockpt.schema.runs import RunDirectory
from autockpt.tuning.alternatives import SORTS, alternatives
from autockpt.tuning.clock import Clock
from autockpt.tuning.opening import blocks_of
from autockpt.tuning.outlook import ghost_runs
from autockpt.tuning.sizes import leanest_head
from autockpt.tuning.targets.base import Prepared


def nothing_fits(
    profiled: CostModel, budget: ResolvedBudget, smallest_peak: int, measured_peak: int = 0
) -> InfeasibleError:
    """The error for a budget that nothing fits, with what the leanest plan's bytes go to.

    ``measured_peak``: the least of real steps, which may be above ``smallest_peak``, the least that is predicted.
    """
    host = profiled.host_budget
    within = f" with at most {format_bytes(host)} of host memory" if host is not None else ""
    wider = " or --host-budget" if host is not None else ""
    size, headroom = format_bytes(budget.bytes), budget.headroom_bytes
    less = f" ({budget.asked} less {format_bytes(headroom)} of --headroom)" if headroom else ""
    needed = max(smallest_peak, measured_peak)
    predicted = f" as measured, {format_bytes(smallest_peak)} as predicted" if measured_peak > smallest_peak else ""
    left = budget.bytes + headroom - needed
    but = f", which fits with --headroom of at most {format_bytes(left)}" if headroom and left >= 0 else ""
    return InfeasibleError(
        f"nothing fits {size}{less}{within}: the leanest plan needs {format_bytes(needed)}{predicted}{but}\n"
        f"{profiled.needs(needed)}",
        remedy=f"Raise the budget{wider}, or {SMALLER}.",
        smallest_peak=needed,
    )


def nothing_compiled_fits(budget: ResolvedBudget, measured: int, smallest_peak: int) -> InfeasibleError:
    """The error for a budget that none of so many ``measured`` compiled plans fits."""
    return InfeasibleError(
        f"no compiled step fits {format_bytes(budget.bytes)}: the leanest of {measured} measured plans needs "
        f"{format_bytes(smallest_peak)}",
        remedy=f"Raise the budget, {SMALLER}, or search without --compile, where layers may be offloaded.",
        smallest_peak=smallest_peak,
    )


def out_of_memory(what: str, why: str, smallest_peak: int | None = None) -> InfeasibleError:
    """The error for a device that the leanest there is runs out of memory on: ``what``, as it said ``why``."""
    remedy = f"{SMALLER[:1].upper() + SMALLER[1:]}."
    return InfeasibleError(f"{what} on this device: {why}", remedy=remedy, smallest_peak=smallest_peak)


def explain_refusal(
    error: InfeasibleError,
    request: SearchRequest,
    prepared: Prepared,
    run: RunDirectory | None,
    profiled: CostModel | None,
    clock: Clock,
) -> None:
    """That nothing fits is an answer, too: ``run`` says so, and ``error`` says what would fit.

    That is a change of the job, or chunks of its output head. Changes are looked for where the budget is no share of
    the job's own peak, and within the ``clock``'s time limit.
    """
    if run is not None:
        plans = ghost_runs(profiled) if profiled is not None else ()
        run.write_outlook(Outlook(plans=plans, infeasible=error.message))
        error.run = run
    found = prepared.found
    if request.compile is not None or not request.alternatives:
        return
    inexact = found.heads is not None and any(isinstance(c, ChunkedLoss) for c in found.heads.graphs)
    if not request.budget.is_share:
        with clock.stage("look for alternatives", SORTS):
            uniform = found.uniform
            if found.twin is not None:  # of the whole model
                kinds = [kind for kind in ("recompute", "save") if kind in uniform]
                uniform = uniform_graphs(found.tracer, blocks_of(found.tracer), kinds)
            what_if = replace(
                prepared.what_if(),
                head=leanest_head(found.heads),
                late=lambda: clock.seconds_left <= 0,
                listener=clock.listener,
            )
            ways = alternatives(request, found.tracer.settings, uniform, what_if, chunked=inexact)
        _add_alternatives(error, ways, clock.timeout if what_if.late() else None, what_if.step_note)
    else:
        if request.budget.kind == "share" and error.smallest_peak:  # of which a smaller job needs more
            error.remedy = error.remedy.replace(f", or {SMALLER}", "")
            error.remedy += _of_shares(error.smallest_peak / prepared.needs(found.plain))
    # what was assumed, or what has no choice, may be that which makes nothing fit
    if notes := (*found.tracer.notes, *found.left_out):
        error.remedy += "\n".join(["\nHow the job was counted:", *(f"• {note}" for note in notes)])


def _of_shares(least: float) -> str:
    """Which shares fit, where the leanest plan needs ``least`` of the peak that saving everything has."""
    return (
        " A share is of the peak of saving everything, weights and optimizer included: the leanest plan needs "
        f"{min(100, math.ceil(100 * least))}% of it. A share of what plans can change is written 60%act: 60 % of the "
        "way from the leanest plan's peak to that of saving everything."
    )


def _add_alternatives(error: InfeasibleError, ways: Sequence[Alternative], ended: float | None, note: str) -> None:
    """Make the alternatives the error's remedy; the run that it is on record in keeps them.

    ``ended``: the time limit, in seconds, at which the search for alternatives
    ended early; ``note`` is on the step times of the ways.
    """
    if ways:
        lines = ["What would fit, least change first, each ghost-run with one choice on all layers; simulated:"]
        error.remedy = "\n".join([*lines, *map(describe, ways), *filter(None, [note])])
        error.alternatives = tuple(ways)
        if error.run is not None:
            known = error.run.outlook() or Outlook(infeasible=error.message)
            error.run.write_outlook(known.model_copy(update={"changes": tuple(ways)}))
    elif ended is not None:
        late = f"What would fit was looked for no longer than the time limit of {ended:g} s, and not found by then."
        error.remedy += f"\n{late}"
    else:  # what was tried in vain is no advice
        tried = (
            "Smaller batches, the head in chunks, leaner optimizers and shorter sequences were ghost-run: none fits."
        )
        error.remedy = f"{error.remedy.replace(f', or {SMALLER}', '')}\n{tried}"


def describe(way: Alternative) -> str:
    """One line for people."""
    step = f", {way.step_seconds:.3g} s a step" if way.step_seconds is not None else ""
    about = "" if way.step_seconds is not None else "about "
    spare = f"fits with {format_bytes(way.spare_bytes)} to spare, " if way.spare_bytes is not None else ""
    return (
        f"{way.options}: {spare}simulated peak {format_bytes(way.peak_bytes)} with {way.plan}{step}, "
        f"{about}{way.relative_cost:.2f} times the seconds per token of the leanest plan ({way.effect})"
    )
