"""The largest batch and the longest sequence that fit, by ghost runs of a few sizes; and the longest sequences for
whoever leaves their length open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from autockpt.analysis.subject import ExplainRequest, Subject, open_subject
from autockpt.analysis.why import Answers, resolved
from autockpt.errors import AutockptError, InfeasibleError, UsageError
from autockpt.measuring.local import refuse_many_processes
from autockpt.schema import Budget, Choice, Graph, Hardware, Listener, Silence, WorkloadSpec, format_bytes
from autockpt.schema.explanation import Dimension, Largest

MOST_RUNS = 8  # sizes tried per plan and dimension
MOST_TIMES = 64  # as large as now is as far as anybody looks
MOST_ROUNDS = 4  # plans that are asked for their largest size, each the leanest at what was found before
GRAIN = 32  # sequences are distinguished to a share of 1/32, in powers of two
FIELDS: dict[Dimension, str] = {"batch size": "batch_size", "sequence length": "seq_len"}  # of WorkloadSpec


class Needed(NamedTuple):
    """Bytes that a step needs, and the ``least`` that it could, were there no gaps between what it holds."""

    peak: int
    least: int


Peak = Callable[[str, int], Needed]


def largest(
    peak: Peak, first: Mapping[str, Needed], budget_bytes: int, dimension: Dimension, now: int
) -> tuple[Largest, ...]:
    """For each plan, the largest size whose peak is within ``budget_bytes``.

    ``first`` gives what every plan needs at the size of ``now``; ``peak(plan, size)`` gives it at others, and raises
    AutockptError where the size cannot be built. Sizes are told apart as ``step_of`` says. At most ``MOST_RUNS`` are
    tried per plan.
    """
    return tuple(_largest(name, partial(peak, name), first[name], budget_bytes, dimension, now) for name in first)


def _largest(
    plan: str, peak: Callable[[int], Needed], first: Needed, budget_bytes: int, dimension: Dimension, now: int
) -> Largest:
    """Close in on the largest size between one that fits (``low``) and one that does not, or cannot be built.

    What a step holds grows about linearly between two sizes. Lines go through the ``least`` that sizes need: near the
    budget an allocator gives back what it can, and peaks are on no line.
    """
    step = step_of(dimension, now)
    most = max(step, now * MOST_TIMES // step * step)
    peaks, least, why, width = {now: first.peak}, {0: 0, now: first.least}, "", 0
    low, high = (now, most + step) if first.peak <= budget_bytes else (0, min(now, most + step))

    def closed() -> bool:
        """Whether no larger size is left to try: one step on the line through the two largest is over the budget.

        What is held is convex in the size (a maximum over moments, each growing linearly or faster), so above it.
        """
        *_, below, top = (0, *sorted(size for size in least if size <= low))
        if high - low <= max(step, step_of(dimension, low)):
            return True
        return below > 0 and least[top] + (least[top] - least[below]) / (top - below) * step > budget_bytes

    for _ in range(MOST_RUNS - 1):
        if closed():
            break
        known = sorted(least)
        near, far = known[-2:] if low == known[-1] else known[:2]
        if low and high in least:
            near, far = low, high
        slope = (least[far] - least[near]) / (far - near)
        aim = far + int((budget_bytes - least[far]) / slope) if slope > 0 else 2 * far
        if high in least:  # where lines lead nowhere, halve
            aim, width = (low + high) // 2 if 2 * (high - low) > width > 0 else aim, high - low
        if why and low:  # where building ends no line tells; a model's own limits are mostly powers of two
            aim = min(aim, 2 * low, (low + high) // 2)
        size = max(step, min(most, max(low + step, min(aim, high - step)) // step * step))
        if size in peaks:
            break
        try:
            peaks[size], least[size] = peak(size)
        except AutockptError as error:
            high, why = min(high, size), error.message.splitlines()[0]
            continue
        low, high = (max(low, size), high) if peaks[size] <= budget_bytes else (low, min(high, size))
    all_tried = closed() and low < most
    if not low and step in peaks:  # the smallest does not fit; others cannot be asked for where a factory makes a batch
        why = ""
    return Largest(
        dimension=dimension,
        plan=plan,  # type: ignore[arg-type]
        value=low or None,
        peak_bytes=peaks[low] if low else None,
        now=now,
        open_ended=low > 0 and (not all_tried or bool(why)),
        why=why or ("" if all_tried or not low else f"{low} was as far as was tried"),
    )


def workload_limits(
    subject: Subject,
    plans: Mapping[str, Mapping[str, Choice]],
    budget_bytes: int,
    dimensions: Collection[Dimension] = ("batch size", "sequence length"),
) -> tuple[Largest, ...]:
    """The largest batch size and sequence length of a workload under ``budget_bytes``, for each of ``plans``.

    Dimensions that it does not have are left out.
    """
    question, spec = subject.question, subject.question.spec
    run = subject.profiled.predictor.graph
    graphs = {name: run(choices) if choices else subject.base for name, choices in plans.items()}
    overhead = subject.profiled.predictor.device.overhead_bytes

    def needed(graph: Graph) -> Needed:
        peak = subject.needs(graph)
        return Needed(peak, min(peak, graph.peak_bytes + overhead))

    first = {name: needed(graph) for name, graph in graphs.items()}
    out: list[Largest] = []
    for dimension, field_name in FIELDS.items():
        settings = subject.tracer.settings
        now = settings.get(field_name) or settings.get(f"asked_{field_name}")
        padded = field_name == "seq_len" and spec is not None and spec.pad_to is not None
        if dimension not in dimensions or not isinstance(now, int) or padded:
            continue

        def peak(plan: str, size: int, field_name: str = field_name) -> Needed:
            with question.sized(field_name, size).tracer() as tracer:
                return needed(tracer.trace(plans[plan]))

        out += largest(peak, first, budget_bytes, dimension, now)
    return tuple(out)


def step_of(dimension: Dimension, size: int) -> int:
    """What sizes of about this one are distinguished by."""
    return 1 if dimension == "batch size" else grain(size)


def grain(size: int) -> int:
    """The power of two that sequence lengths are distinguished by."""
    return max(1, 1 << max(0, (size // GRAIN).bit_length() - 1))


def with_longest(
    spec: WorkloadSpec,
    budget: Budget,
    *,
    device: str | None = None,
    hardware: Hardware | None = None,
    listener: Listener | None = None,
) -> tuple[WorkloadSpec, str]:
    """The workload, for a search, with the longest sequences that its leanest plan holds ``budget`` with, and a note.

    By ghost runs of a few lengths; nothing is measured. Lengths are told apart to about a share of 1/32. Raises
    UsageError for a budget that is a share of the job's own peak, for models without sequences and under a distributed
    launch, InfeasibleError where not even the shortest fits.
    """
    refuse_many_processes()
    budget.refuse_share("grows with its sequences")
    asked = ExplainRequest(spec=spec, budget=budget, device=device, hardware=hardware)
    found = largest_lean(asked, "sequence length", listener or Silence())
    if found is None:
        raise UsageError(
            "this workload has no sequence length that could be found",
            remedy="Leave --seq-len auto and `pad_to` out; a function of your own needs a parameter seq_len with a "
            "default.",
        )
    if found.value is None and found.why:
        raise UsageError(f"other sequence lengths cannot be asked for: {found.why}", remedy="Leave --seq-len auto out.")
    if found.value is None:
        raise InfeasibleError(
            f"not even the shortest sequences fit {budget.text}", remedy="Give a larger budget or a smaller batch."
        )
    peak = f", simulated peak {format_bytes(found.peak_bytes)}" if found.peak_bytes is not None else ""
    why = f" ({found.why})" if found.open_ended and found.why else ""
    said = f"the longest sequences that fit with the leanest plan: {found.value:,} tokens{peak}{why}"
    return spec.model_copy(update={"seq_len": found.value}), said


@dataclass(frozen=True)
class Lean:
    """The largest size of a plan that was the leanest at another one."""

    largest: Largest
    choices: Mapping[str, Choice]


def largest_lean(
    question: ExplainRequest, dimension: Dimension, listener: Listener, first: Lean | None = None
) -> Largest | None:
    """The largest size that fits with the leanest plan of that very size; None for a workload without such sizes.

    At sizes of now the optimizer may set the peak, and every plan seem as lean as any other: so it is asked again at
    what was found, where another plan is the leanest there. ``first`` is the answer at the size of now, where known.
    """
    best = first if first is not None else _with_leanest(question, dimension, listener)
    if best is None:
        return None
    now = best.largest.now
    for _ in range(MOST_ROUNDS - 1):
        size = best.largest.value
        if size is None or abs(size - best.largest.now) <= step_of(dimension, size):
            break
        found = _with_leanest(question.sized(FIELDS[dimension], size), dimension, listener, unlike=best.choices)
        if found is None or found.largest.value is None:
            break
        best = found  # where it is less, too: a search there would know the plan that is the leanest there
        if found.largest.value - size <= step_of(dimension, found.largest.value):
            break
    return best.largest.model_copy(update={"now": now})


def _with_leanest(
    question: ExplainRequest, dimension: Dimension, listener: Listener, unlike: Mapping[str, Choice] | None = None
) -> Lean | None:
    """The largest size of the plan that is the leanest at the size of now.

    None where there is no such size, or where that plan is the one not to be asked about again.
    """
    with open_subject(question, listener) as subject:
        answers = Answers(subject.profiled, subject.uniform)
        budget, lean = resolved(question, answers), answers.lean.choices
        if budget is None or subject.base.source != "ghost" or lean == unlike:
            return None
        listener.stage("trying other sizes")
        found = workload_limits(subject, {"leanest": lean}, budget.bytes, [dimension])
    return Lean(found[0], lean) if found else None
