"""The largest size that fits with the leanest plan, and the longest sequences for whoever leaves their length open."""

from __future__ import annotations

from dataclasses import replace

from autockpt.errors import InfeasibleError, UsageError
from autockpt.explaining.limits import FIELDS, step_of, workload_limits
from autockpt.explaining.subject import ExplainRequest, open_subject
from autockpt.explaining.why import Answers, resolved
from autockpt.schema import Budget, Hardware, Listener, Silence, WorkloadSpec, format_bytes
from autockpt.schema.explanation import Dimension, Largest

MOST_ROUNDS = 4


def with_longest(
    spec: WorkloadSpec,
    budget: Budget,
    *,
    device: str | None = None,
    hardware: Hardware | None = None,
    listener: Listener | None = None,
) -> tuple[WorkloadSpec, str]:
    """The workload with the longest sequences that its leanest plan holds ``budget`` with, and a word on that.

    By ghost runs of a few lengths; nothing is measured. Lengths are told apart to about a share of 1/32. Raises
    UsageError for a budget that is a share of the job's own peak and for models without sequences, InfeasibleError
    where not even the shortest fits.
    """
    budget.refuse_share("grows with its sequences")
    asked = ExplainRequest(spec=spec, budget=budget, device=device, hardware=hardware)
    found = largest_lean(asked, "sequence length", listener or Silence())
    if found is None:
        raise UsageError(
            "this workload has no sequence length that could be found",
            remedy="Leave --seq-len auto and --pad-to out.",
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


def largest_lean(
    question: ExplainRequest, dimension: Dimension, listener: Listener, first: Largest | None = None
) -> Largest | None:
    """The largest size that fits with the leanest plan of that very size; None for a workload without such sizes.

    At sizes of now the optimizer may set the peak, and every plan seem as lean as any other: so it is asked again at
    what was found, with the plan that is the leanest there. ``first`` is the answer at the size of now, where known.
    """
    best = first if first is not None else _with_leanest(question, dimension, listener)
    for _ in range(MOST_ROUNDS - 1):
        if best is None or best.value is None or abs(best.value - best.now) <= step_of(dimension, best.value):
            break
        spec = question.spec.model_copy(update={FIELDS[dimension]: best.value})
        found = _with_leanest(replace(question, spec=spec), dimension, listener)
        if found is None or found.value is None or found.value <= best.value:
            break
        grown = found.value - best.value
        best = found.model_copy(update={"now": best.now})
        if grown <= step_of(dimension, found.value):
            break
    return best


def _with_leanest(question: ExplainRequest, dimension: Dimension, listener: Listener) -> Largest | None:
    """The largest size of the plan that is the leanest at the size of now; None where there is no such size."""
    with open_subject(question, listener) as subject:
        answers = Answers(subject.profiled, subject.uniform)
        budget, lean = resolved(question, answers), answers.lean.choices
        if budget is None or subject.base.source != "ghost":
            return None
        listener.stage("trying other sizes")
        found = workload_limits(subject, {"leanest": lean}, budget.bytes, [dimension])
    return next(iter(found), None)
