"""The answer of a search where no plan fits: the least that any plan needs, and changes of the job that would fit.

Changes are smaller batches, the head in chunks, adapters, leaner optimizers, more devices. Each is ghost-run with
uniform plans, so a search of it can only do better. The mildest change of each kind that fits is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch

from autockpt.cost import CostModel, UniformRuns, uniform_graphs
from autockpt.errors import AutockptError, InfeasibleError, UsageError
from autockpt.schema import SAVE, ResolvedBudget, SearchRequest, format_bytes
from autockpt.schema.choices import ChunkedLoss
from autockpt.schema.run_directory import RunDirectory
from autockpt.schema.trial import Alternative, Outlook
from autockpt.schema.words import step_note
from autockpt.tuning.clock import Clock
from autockpt.tuning.job_sizes import Variant, WhatIf, job_of, largest_that_fits, leanest_head, predictions, what_if_of
from autockpt.tuning.targets.base import Prepared
from autockpt.tuning.traced_model import blocks_of
from autockpt.workload import Step
from autockpt.workload.factory import is_factory

# changes in the words of the field, which hold for options, arguments and trainers alike
SMALLER = "use a smaller batch (accumulate keeps its effect), shorter sequences, LoRA, or SGD"
INEXACT = "inexact choices allowed (allow_inexact)"
FOUR_BITS = "base weights in 4 bits (NF4, quantised twice)"
MOST = 3  # alternatives that are reported
SHARED, MOST_RANKS = "sharded over", 64
LORA_RANK = 16
SHORTEST = 128  # tokens
SORTS = 12  # of changes at most: five single ones, five of two or three, shorter sequences, and all together
_ADAPTERS = "adapters only are trained"
FUSED, EIGHT_BIT, PLAIN = "adamw_fused", "adamw8bit", "sgd"
LEANER_OPTIMIZERS = {
    FUSED: "no temporaries of the optimizer; the same update up to rounding",
    EIGHT_BIT: "optimizer states in 8 bits; other training",
    PLAIN: "no optimizer states; other training",
}
"""The mildest first, and what each changes."""


def nothing_fits(
    cost_model: CostModel, budget: ResolvedBudget, smallest_peak: int, measured_peak: int = 0
) -> InfeasibleError:
    """The error for a budget that nothing fits, with what the leanest plan's bytes go to.

    ``measured_peak``: the least of real steps, which may be above ``smallest_peak``, the least that is predicted.
    """
    host = cost_model.host_budget
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
        f"{cost_model.describe_bytes(needed)}",
        remedy=f"Raise the budget{wider}, or {SMALLER}.",
        smallest_peak=needed,
    )


def out_of_memory(what: str, why: str, smallest_peak: int | None = None) -> InfeasibleError:
    """The error where even the leanest plan runs out of memory: ``what`` failed, and ``why``."""
    remedy = f"{SMALLER[:1].upper() + SMALLER[1:]}."
    return InfeasibleError(f"{what} on this device: {why}", remedy=remedy, smallest_peak=smallest_peak)


def explain_refusal(
    error: InfeasibleError, prepared: Prepared, run: RunDirectory | None, cost_model: CostModel | None, clock: Clock
) -> None:
    """Write to ``run`` that nothing fits, and add to ``error`` what would fit.

    Changes of the job are looked for unless the budget is a share of the job's own peak, within the ``clock``'s limit.
    """
    request, traced = prepared.request, prepared.traced
    known = cost_model.predictor.ghost_runs if cost_model is not None else ()
    outlook = Outlook(plans=known, infeasible=error.message)
    if run is not None:
        run.write_outlook(outlook)
    if request.compile is not None or not request.alternatives:
        return
    if not request.budget.is_share:
        error.alternatives = changes = _alternatives_of(prepared, clock)
        if changes and run is not None:
            run.write_outlook(outlook.model_copy(update={"changes": changes}))
        if changes:
            lines = ["What would fit, least change first, each ghost-run with one choice on all layers; simulated:"]
            note = step_note(prepared.environment, request.workload)
            error.remedy = "\n".join(filter(None, [*lines, *map(describe, changes), note]))
        elif clock.passed(1.0):
            limit = f"no longer than the time limit of {clock.timeout:g} s"
            error.remedy += f"\nWhat would fit was looked for {limit}, and not found by then."
        else:  # do not suggest what was tried in vain
            error.remedy = error.remedy.replace(f", or {SMALLER}", "")
            tried = "Smaller batches, the head in chunks, leaner optimizers and shorter sequences"
            error.remedy += f"\n{tried} were ghost-run: none fits."
    elif request.budget.kind == "share" and error.smallest_peak:  # of which a smaller job needs more
        least = min(100, math.ceil(100 * error.smallest_peak / prepared.bytes_needed(traced.plain)))
        error.remedy = (
            f"{error.remedy.replace(f', or {SMALLER}', '')} A share is of the peak of saving everything, weights and "
            f"optimizer included: the leanest plan needs {least} % of it. A share of what plans can change is written "
            "60%act: 60 % of the way from the peak of the leanest plan without a choice for the output head to that of "
            "saving everything."
        )
    # assumptions, or modules without a choice, may be why nothing fits
    if notes := (*traced.tracer.notes, *traced.left_out):
        error.remedy += "\n".join(["\nHow the job was counted:", *(f"• {note}" for note in notes)])


def _alternatives_of(prepared: Prepared, clock: Clock) -> tuple[Alternative, ...]:
    """Look for changes of a traced job that fit its budget, within the ``clock``'s time limit."""
    request, traced, uniform = prepared.request, prepared.traced, prepared.traced.uniform
    clock.listener.stage("look for alternatives", SORTS)
    what_if = replace(
        what_if_of(request, uniform, prepared.environment, prepared.used_by_others),
        head=leanest_head(traced.heads),
        late=partial(clock.passed, 1.0),
        listener=clock.listener,
    )
    if traced.twin is not None:  # the whole model's are needed
        kinds = [kind for kind in ("recompute", "save") if kind in uniform]
        uniform = uniform_graphs(traced.tracer, blocks_of(traced.tracer), kinds)
    chunked = any(isinstance(choice, ChunkedLoss) for choice in traced.heads)
    return alternatives(request, traced.tracer.settings, uniform, what_if, chunked=chunked)


def describe(change: Alternative) -> str:
    """An alternative as one line of text."""
    step = f", {change.step_seconds:.3g} s a step" if change.step_seconds is not None else ""
    about = "" if change.step_seconds is not None else "about "
    spare = f"fits with {format_bytes(change.spare_bytes)} to spare, " if change.spare_bytes is not None else ""
    return (
        f"{change.options}: {spare}simulated peak {format_bytes(change.peak_bytes)} with {change.plan}{step}, "
        f"{about}{change.relative_cost:.2f} times the seconds per token of the leanest plan ({change.effect})"
    )


# -- changes of the job ------------------------------------------------------------------------------------------------


def joined(*changes: str, by: str = ", ") -> str:
    """Several changes as one."""
    return by.join(filter(None, changes))


@dataclass(frozen=True)
class Change:
    """A variant of the job, what it is called, and whether its head runs in chunks."""

    job: SearchRequest
    options: str = ""
    effect: str = ""
    chunked: bool = False

    def then(
        self, options: str, effect: str, *, chunked: bool = False, step: Step | None = None, **update: Any
    ) -> Change:
        """This change and one more: an ``update`` of what trains, or another live ``step``."""
        job = job_of(self.job, **update) if step is None else self.job.model_copy(update={"step": step})
        effects = joined(self.effect, effect, by="; ")
        return Change(job, joined(self.options, options), effects, self.chunked or chunked)


def alternatives(
    job: SearchRequest, settings: Mapping[str, Any], base: UniformRuns, what_if: WhatIf, *, chunked: bool = False
) -> tuple[Alternative, ...]:
    """What makes a job fit, at most three ways: on one device first, those that change training least before others.

    Where no single change helps, changes are combined; shorter sequences come last, for they are another job.

    ``settings`` are the resolved ones of the job, ``base`` the ghost runs of its uniform plans. ``chunked``: its head
    runs in chunks already. Empty where nothing that is tried fits. Variants that cannot be built are left out.
    """
    leanest = min(predictions(what_if, base).values(), key=lambda p: p.peak_bytes)
    standard = (leanest.step_seconds or 0.0) / _work(settings)
    as_it_is, length = Change(job), settings.get("seq_len") or 0
    batches = list[Change]()
    with suppress(UsageError):  # a live batch that cannot be divided
        batches.extend(_smaller_batches(as_it_is, settings.get("batch_size") or 0))
    smallest = batches[-1] if batches else as_it_is
    found: list[Alternative] = []

    def try_each(*families: Iterable[Change], most: int | None = None) -> bool:
        """Whether a change is found by now that needs no further devices."""
        mildest = (_mildest(family, what_if, standard) for family in families if not what_if.late())
        found.extend(islice(filter(None, mildest), most))
        return any(SHARED not in change.options for change in found)

    chunks = [] if chunked else [_in_chunks(as_it_is)]
    if not try_each(batches, chunks, _with_adapters(as_it_is), _lean_optimizers(as_it_is), _sharded(as_it_is)):
        leaner = [*islice(_lean_optimizers(smallest), 2)], [*_with_adapters(smallest)]
        both = leaner if batches else ()
        more = () if chunked else (map(_in_chunks, family) for family in (batches, *leaner))
        if not try_each(*more, *both, most=1):  # the last resort: shorter sequences; then all at once
            try_each(_shorter_sequences(as_it_is, length))
            start = [smallest if chunked else _in_chunks(smallest), *_with_adapters(smallest)]
            whole = [change for change in start if FOUR_BITS not in change.options]  # packed weights are not divided
            shared = () if found else _sharded(whole[-1])
            try_each(chain(start[1:], _shorter_sequences(start[-1], length), shared))
    return tuple(sorted(found, key=lambda change: SHARED in change.options)[:MOST])


def _in_chunks(of: Change) -> Change:
    """The same with head and loss in chunks."""
    return of.then(INEXACT, "head and loss in chunks: gradients equal up to rounding", chunked=True)


def _smaller_batches(of: Change, rows: int) -> Iterator[Change]:
    """Fewer of these rows in a micro-batch, and as many more of these."""
    trained = of.job.workload or of.job.step
    for fewer in (size for size in range(rows // 2, 0, -1) if rows % size == 0):
        accumulate = trained.accumulate * (rows // fewer)
        description = f"batch {rows} → {fewer}, the same rows in every optimizer step"
        options = f"batch size {fewer}, accumulate {accumulate}"
        yield of.then(options, description, batch_size=fewer, accumulate=accumulate)


def _shorter_sequences(of: Change, length: int) -> Iterator[Change]:
    """Half as long, and half as long again: ids, labels and masks cut."""
    while (length := length // 2) >= SHORTEST:
        yield of.then(f"sequences of {length} tokens", "shorter sequences", seq_len=length)


def _with_adapters(of: Change) -> Iterator[Change]:
    """Adapters alone trained, then these on a base in 4 bits; a live model is trained as it is.

    Only what this job has not already, and what can be put on it.
    """
    if (spec := of.job.workload) is None:
        return
    options = ""
    if spec.lora is None:
        options = f"LoRA of rank {LORA_RANK}"
        yield of.then(options, _ADAPTERS, lora=LORA_RANK)
    if not (spec.load_in_4bit or spec.quantization or is_factory(spec.model)):
        effect = f"{_ADAPTERS} on a base in 4 bits" if options else "the base in 4 bits"
        yield of.then(joined(options, FOUR_BITS), effect, lora=spec.lora or LORA_RANK, load_in_4bit=True)


def _lean_optimizers(of: Change) -> Iterator[Change]:
    """Optimizers that hold less; the mildest first.

    AdamW in one kernel, which holds no temporaries; states in 8 bits, which take a library and CUDA; SGD.
    """
    spec, step = of.job.workload, of.job.step
    if spec is None:
        optimizer = step.optimizer
        if optimizer is not None and not isinstance(optimizer, torch.optim.SGD) and step.full_step is None:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            plain = replace(step, optimizer=torch.optim.SGD(trained, lr=1e-3), settings={})
            yield of.then(f"optimizer {PLAIN}", LEANER_OPTIMIZERS[PLAIN], step=plain)
    elif (now := spec.optimizer) not in ("none", PLAIN):
        tried = {FUSED: now == "adamw", EIGHT_BIT: now != EIGHT_BIT and of.job.hardware is not None, PLAIN: True}
        for name in (name for name, wanted in tried.items() if wanted):
            yield of.then(f"optimizer {name}", LEANER_OPTIMIZERS[name], optimizer=name)


def _sharded(of: Change) -> Iterator[Change]:
    """Over more and more devices by FSDP2, each with rows of its own; only where that can be simulated."""
    now = of.job.described.shard if of.job.hardware is not None else "measured"
    if isinstance(now, str):
        return
    ranks = 2 * (now or 1)
    while ranks <= MOST_RANKS:
        description = f"weights, gradients and optimizer states shared by {ranks} devices"
        yield of.then(f"{SHARED} {ranks} devices", description, shard=ranks)
        ranks *= 2


def _mildest(changes: Iterable[Change], what_if: WhatIf, standard: float) -> Alternative | None:
    """The mildest change that fits; None where none does, or this sort of change is not possible for this job.

    ``changes`` are the mildest first; ``standard``: seconds per token.
    """
    with ExitStack() as stack:
        try:
            found = [(change, Variant(change.job, what_if, stack, chunked=change.chunked)) for change in changes][::-1]
            sizes = range(1, len(found) + 1)
            at = largest_that_fits(sizes, lambda size: found[size - 1][1].least_bytes(), what_if.budget_bytes)
            return None if at is None else _alternative(*found[at - 1], what_if, standard)
        except AutockptError:
            return None
        finally:
            what_if.listener.advance()


def _alternative(change: Change, variant: Variant, what_if: WhatIf, standard: float) -> Alternative | None:
    """The change with the fastest uniform plan that fits."""
    for kinds in ([SAVE.kind], what_if.kinds):  # saving everything is the fastest where it fits
        known = variant.predicted(kinds)
        if fitting := [kind for kind, prediction in known.items() if prediction.peak_bytes <= what_if.budget_bytes]:
            break
    else:
        return None
    kind = min(fitting, key=lambda kind: known[kind].step_seconds or 0.0)
    best, head = known[kind], "".join(f" and {name} on {choice.kind}" for name, choice in variant.besides.items())
    seconds = (best.step_seconds or 0.0) / _work(variant.tracer.settings)
    return Alternative(
        options=change.options,
        effect=change.effect,
        plan=f"every layer on {kind}{head}",
        peak_bytes=best.peak_bytes,
        spare_bytes=what_if.budget_bytes - best.peak_bytes,
        step_seconds=best.step_seconds if change.job.hardware is not None else None,  # else nominal
        relative_cost=seconds / standard if standard else 1.0,
    )


def _work(settings: Mapping[str, Any]) -> float:
    """Tokens of one cycle, or its rows."""
    tokens = settings.get("tokens")
    return float(tokens or (settings.get("batch_size") or 1) * (settings.get("accumulate") or 1))
