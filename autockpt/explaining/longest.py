"""The longest sequences that fit a budget, for whoever leaves their length open."""

from __future__ import annotations

from dataclasses import replace

from autockpt.errors import InfeasibleError, UsageError
from autockpt.explaining.build import resolved
from autockpt.explaining.limits import grain, workload_limits
from autockpt.explaining.subject import ExplainRequest, open_subject
from autockpt.explaining.why import Answers
from autockpt.schema import Budget, Listener, Silence, WorkloadSpec, format_bytes
from autockpt.schema.explanation import Largest
from autockpt.schema.hardware import Hardware

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
    longest, value = None, 0
    for _ in range(MOST_ROUNDS):  # at longer sequences another plan may be the leanest
        found = _longest(replace(asked, spec=spec), listener or Silence())
        if found is None:
            raise UsageError(
                "this workload has no sequence length that could be found",
                remedy="Leave --seq-len auto and --pad-to out.",
            )
        grown = (found.value or 0) - value
        if grown <= 0:
            break
        longest, value = found, value + grown
        spec = spec.model_copy(update={"seq_len": value})
        if grown <= grain(value):
            break
    if longest is None:
        raise InfeasibleError(
            f"not even the shortest sequences fit {budget.text}", remedy="Give a larger budget or a smaller batch."
        )
    peak = f", simulated peak {format_bytes(longest.peak_bytes)}" if longest.peak_bytes is not None else ""
    why = f" ({longest.why})" if longest.open_ended and longest.why else ""
    return spec, f"the longest sequences that fit with the leanest plan: {value:,} tokens{peak}{why}"


def _longest(question: ExplainRequest, listener: Listener) -> Largest | None:
    """The sequence length of the leanest plan; None where there is no such."""
    with open_subject(question, listener) as subject:
        answers = Answers(subject.profiled, subject.uniform)
        budget, lean = resolved(question, answers), answers.lean.choices
        if budget is None or subject.base.source != "ghost":
            return None
        listener.stage("trying other sizes")
        found = workload_limits(
            question.spec,
            {"leanest": (lean, subject.profiled.predictor.graph(lean))},
            subject.tracer.settings,
            budget.bytes,
            lambda spec: question.tracer(spec, fallback=False),
            subject.needs,
            ["sequence length"],
        )
    return next(iter(found), None)
