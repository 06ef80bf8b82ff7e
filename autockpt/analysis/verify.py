"""Verify a plan by real steps: gradients, recomputed and offloaded tensors, peak and step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from autockpt.analysis.explain import OTHER_WORKLOAD, made_for
from autockpt.devices import get_device
from autockpt.errors import AutockptError, ConflictError, DeviceOutOfMemory, PlanError, RerunMismatch
from autockpt.measuring import LocalMeasurer, Measurer, WorkerMeasurer
from autockpt.measuring.base import beats_counted
from autockpt.measuring.device_lock import device_lock
from autockpt.measuring.statistics import Interval, ratio_interval
from autockpt.runtime import DivergenceCheck
from autockpt.schema import words
from autockpt.schema.base import Data
from autockpt.schema.baselines import ALL, NONE, baseline_plans
from autockpt.schema.choices import RECOMPUTE, Choice
from autockpt.schema.plan import Plan
from autockpt.schema.request import Listener, Silence
from autockpt.schema.run_directory import plan_at
from autockpt.schema.sizes import format_bytes
from autockpt.schema.trial import Measurement
from autockpt.schema.workload import WorkloadSpec
from autockpt.verification import Observation, judge, observe_reference
from autockpt.workload import Step

WORKER = "autockpt.analysis.verify_worker"
OBSERVED = 3
"""Observations that gradients are compared by: two of the reference, which should repeat itself, and the plan's."""
PEAK_SLACK = 0.01
"""A measured peak may exceed a promised one by this share: allocators differ a little from run to run."""
TIME_SLACK = 0.10
"""A step may be slower than promised by this share, and the noise of both measurements."""
SIMULATED_PEAK_SLACK = 0.05
"""The same for a peak that was simulated for a GPU: its allocator is modelled."""


CheckState = Literal["passed", "failed", "skipped"]


class Check(Data):
    """One promise of a plan, compared with real steps."""

    name: str = Field(description="gradients, sentinels, peak, step time, …")
    state: CheckState
    detail: str = Field(default="", description="what was compared with what, in words and numbers")


class VerifyReport(Data):
    """All checks of one plan on one device. ``skipped`` says in its detail why."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    measured: Measurement | None = Field(default=None, description="what the plan's steps took")

    def __str__(self) -> str:
        rows = [f"{check.name} {check.state}: {check.detail}" for check in self.checks]
        return "\n".join([*rows, *(f"• {note}" for note in self.notes), self.verdict])

    @property
    def verdict(self) -> str:
        """What follows from the checks, in one sentence."""
        failed = [c.name for c in self.checks if c.state == "failed"]
        if failed:
            return f"The plan does not keep its promise: {', '.join(failed)}."
        if any(c.state == "skipped" and c.name.startswith("gradients") for c in self.checks):
            return "No check failed, but gradients were not compared."
        if any(c.state == "passed" for c in self.checks if c.name in ("peak", "step time")):
            return "The plan keeps its promise."
        if self.passed:
            return "No check failed; no peak or step time was compared with the plan's."
        return "Nothing could be checked."

    @property
    def passed(self) -> bool:
        """No check failed and at least one was made."""
        states = [c.state for c in self.checks]
        return "passed" in states and "failed" not in states


def verify(
    plan: Plan | str | Path,
    workload: WorkloadSpec | Step | None = None,
    *,
    device: str | None = None,
    listener: Listener | None = None,
    steps: int = 10,
) -> VerifyReport:
    """Run training steps under a plan and plain ones, and compare them with what the plan promises.

    ``workload`` defaults to what the plan was made for. A spec is run in a worker process; a live workload in this one,
    whose state is restored. ``steps`` cycles are timed.

    Checks, in order: *gradients* of two steps bit-equal with plain training (where a choice is not exact: equal within
    a tolerance, and the report says so), with losses, buffers and random states; where plain training does not fit,
    with recomputing every layer. *sentinels*: all that backward gets recomputed or back from elsewhere is what forward
    had computed. *peak* and *step time* as promised (alternated with saving or recomputing everything, where that was
    measured for the plan and fits: a slow day slows both).

    Of a plan with sets of choices for smaller batches every set is compared with its own promise, at its own length; of
    a live workload, whose batch is as it is, smaller sets' gradients alone.

    Steps are compiled as those that the plan was made for.

    Raises PlanError where the plan does not belong to the model, or does not say what to run; UsageError where nothing
    can be compiled here.
    """
    if not isinstance(plan, Plan):
        plan = plan_at(Path(plan))
    subject = workload if workload is not None else plan.workload
    if subject is None:
        raise PlanError(
            "the plan does not say which training step it was made for",
            remedy="Describe it with --job FILE: `model: llama-8b`, `batch_size: 4`, … one per line.",
        )
    if isinstance(subject, WorkloadSpec) and (only := subject.simulated_only()):
        raise PlanError(
            f"the plan is for {', '.join(only)}, which real steps of one process do not follow",
            remedy="Train with it: gradients are checked there, and print(handle.sentinels) says how many. Or search "
            "without these keys, and verify that plan.",
        )
    listener = listener or Silence()
    with _open(subject, device, plan, listener) as runs:
        asked = (subject, runs, listener, steps)
        report = _Verification(_for(plan, subject), *asked).report()
        if not isinstance(subject, WorkloadSpec):
            for each in plan.sets[:-1]:
                gradients = VerifyReport(checks=(_Verification(each, *asked).gradients(),))
                report = _with_set(report, each, gradients)
            return report
    for each in plan.sets[:-1]:
        length = each.workload.seq_len if each.workload is not None else None
        spec = subject.model_copy(update={"seq_len": length or subject.seq_len})
        report = _with_set(report, each, verify(each, spec, device=device, listener=listener, steps=steps))
    return report


def _for(plan: Plan, subject: WorkloadSpec | Step) -> Plan:
    """The plan, which promises nothing for another workload than its own; a budget in bytes holds for any."""
    if not isinstance(subject, WorkloadSpec) or made_for(plan, subject):
        return plan
    share = plan.budget is not None and "%" in plan.budget.asked
    promised = {"measured": None, "predicted": None, "baselines": (), "budget": None if share else plan.budget}
    return plan.model_copy(update={"source": "unmeasured", **promised})


def _with_set(report: VerifyReport, plan: Plan, found: VerifyReport) -> VerifyReport:
    """The report, and what was found of a set for smaller batches."""
    which = "" if plan.when is None else f", {plan.when.tokens:,} tokens"  # short: it stands in a column
    named = (check.model_copy(update={"name": f"{check.name}{which}"}) for check in found.checks)
    notes = (note for note in found.notes if note not in report.notes)
    return report.model_copy(update={"checks": (*report.checks, *named), "notes": (*report.notes, *notes)})


@contextmanager
def _open(subject: WorkloadSpec | Step, device: str | None, plan: Plan, listener: Listener) -> Iterator[Measurer]:
    """What measures the subject."""
    more = {"host_budget": plan.host_budget_bytes, "compile": plan.compile}
    here = get_device(device if isinstance(subject, WorkloadSpec) else str(subject.device))
    if here.kind == "cpu" and plan.environment is not None and (planned := plan.environment.device).kind != here.kind:
        listener.note(f"The plan is for {planned.name}. Here its steps run on the CPU: minutes each for a large model.")
    with device_lock(here, listener.note):
        if isinstance(subject, WorkloadSpec):
            opened: Measurer = WorkerMeasurer(subject, device, **more)
        else:
            opened = LocalMeasurer(subject, **more)
        with opened:
            yield opened


@dataclass
class _Verification:
    """One run of all checks."""

    plan: Plan
    subject: WorkloadSpec | Step
    measurer: Measurer
    listener: Listener
    steps: int

    def __post_init__(self) -> None:
        self.measured: Measurement | None = None
        self.notes: list[str] = []
        self.listener.stage("build the model")
        found = self.measurer.call(f"{WORKER}:choices_of", {"plan": self.plan})
        self.choices: dict[str, Choice] = found["choices"]
        self.blocks: list[str] = found["blocks"]

    def report(self) -> VerifyReport:
        if isinstance(self.subject, WorkloadSpec) and not made_for(self.plan, self.subject):
            self.notes.append(OTHER_WORKLOAD)
        elif self.plan.status_reason:
            self.notes.append(f"The plan is unmeasured: {self.plan.status_reason}.")
        checks = (self.gradients(), self._sentinels(), *self._promises())
        return VerifyReport(checks=checks, notes=tuple(self.notes), measured=self.measured)

    # --- gradients

    def gradients(self) -> Check:
        """Compared with plain training; where that does not fit, with recomputing every layer."""
        try:
            return self._compared("plain training", None)
        except DeviceOutOfMemory as error:
            self.notes.append(f"Plain training does not fit: {error.message}")
        try:
            return self._compared("recomputing every layer", dict.fromkeys(self.blocks, RECOMPUTE))
        except DeviceOutOfMemory:
            return _check("gradients", None, "neither plain training nor recomputing every layer fits")

    def _compared(self, what: str, reference: Mapping[str, Choice] | None) -> Check:
        """Compare two steps under the plan with two under ``reference`` (None: plain training).

        Bit by bit, or within rounding where a choice is not exact or steps are compiled; those with each other. The
        listener sees the observations pass, ``OBSERVED`` of them in each of its stages.

        Passes DeviceOutOfMemory on where the *reference* does not fit; a plan that does not fit has failed.
        """
        self.listener.stage(f"compare gradients with {what}", OBSERVED)
        compiled = self.plan.compile is not None
        sketched = compiled or not all(choice.exact for choice in self.choices.values())

        def run(which: Mapping[str, Choice] | None, deterministic: bool) -> Observation:
            payload = {"choices": which, "deterministic": deterministic, "sketched": sketched}
            observed = self.measurer.call(f"{WORKER}:observe_steps", payload)
            self.listener.advance()
            return observed

        def again() -> None:
            self.listener.stage("compare gradients by deterministic kernels", OBSERVED)

        twice = observe_reference(partial(run, reference), again)
        try:
            planned = run(self.choices, twice.deterministic)
        except AutockptError as error:
            return _failed("gradients", error)
        result = judge(twice, planned)
        if compiled and not result.equal and twice.first.draws:
            detail = "compiled code draws random numbers in an order of its own under every plan; switch dropout off"
            return _check("gradients", None, detail)
        sides = (f"{what} compiled alike", "compilers round in their own way") if compiled else (what,)
        return _check("gradients", result.equal, result.describe(*sides))

    # --- sentinels

    def _sentinels(self) -> Check:
        if self.plan.compile is not None:
            return _check("sentinels", None, "compiled graphs have none; the peak shows what they keep")
        self.listener.stage("check what is recomputed")
        try:
            return judge_sentinels(self.measurer.call(f"{WORKER}:checked_step", {"choices": self.choices}))
        except (DeviceOutOfMemory, RerunMismatch) as error:
            return _failed("sentinels", error)

    # --- peak and step time

    def _promises(self) -> Iterator[Check]:
        budget_bytes = self.plan.budget.whole if self.plan.budget is not None else None
        self.listener.stage("measure peak and step time", self.steps)
        try:
            with beats_counted(self.measurer, self.listener):
                measured = self.measurer.measure(self.choices, steps=self.steps, budget_bytes=budget_bytes)
        except (DeviceOutOfMemory, ConflictError) as error:
            yield _failed("peak", error)
            yield _check("step time", None, "no step could be timed")
            return
        self.measured, here = measured, self.measurer.environment.device
        yield judge_peak(self.plan, measured, here.kind)
        same = self.plan.environment is not None and self.plan.environment.device == here
        alone = judge_time(self.plan, measured, same)
        yield alone if alone.state == "skipped" else self._step_time_compared(measured) or alone

    def _step_time_compared(self, measured: Measurement) -> Check | None:
        """Interleaved with a baseline where one fits: a machine that is slower today slows both alike."""
        rounds = max(3, self.steps // 2)
        promised = {row.name: row.measured for row in self.plan.baselines if row.measured is not None}
        for name in (name for name in (NONE, ALL) if name in promised):
            self.listener.stage(f"time the plan and {name!r}, interleaved", 2 * rounds)
            plans = {"plan": self.choices, name: baseline_plans(self.blocks, (RECOMPUTE.kind,))[name]}
            with suppress(DeviceOutOfMemory), beats_counted(self.measurer, self.listener):
                times = self.measurer.compare(plans, rounds=rounds)
                ratio = ratio_interval(times["plan"], times[name])
                return judge_ratio(self.plan, measured, name, promised[name], ratio)
        return None


# --- what is concluded from steps under a plan and reference steps


def simulated_for(plan: Plan) -> str:
    """The device that a plan's numbers were simulated for."""
    return plan.environment.device.name if plan.environment is not None else "a device that the plan does not name"


def _check(name: str, kept: bool | None, detail: str) -> Check:
    """Whether a promise was kept; None: it could not be compared."""
    state: CheckState = "skipped" if kept is None else "passed" if kept else "failed"
    return Check(name=name, state=state, detail=detail)


def _failed(name: str, error: AutockptError) -> Check:
    return _check(name, False, f"{'out of memory: ' * isinstance(error, DeviceOutOfMemory)}{error.message}")


def judge_sentinels(sentinels: DivergenceCheck) -> Check:
    """What sentinels have compared in the step; what differs has ended it."""
    unchecked = {why for unit in sentinels.units.values() for why in unit.unchecked}
    besides = f"; not checked: {', '.join(sorted(unchecked))}" if unchecked else ""
    if not sentinels.checks:
        return _check("sentinels", None, f"nothing runs again or comes back from elsewhere{besides}")
    units = sum(1 for unit in sentinels.units.values() if unit.checks)
    detail = f"{sentinels.tensors} saved tensors of {units}/{len(sentinels.units)} units matched the forward pass"
    return _check("sentinels", True, f"{detail}{besides}")


def judge_peak(plan: Plan, measured: Measurement, kind: str | None = None) -> Check:
    """The measured peak, on a device of ``kind`` (None: the plan's), against the budget and the promised peak.

    One that was simulated for another kind of device is only compared.
    """
    simulated = plan.status == "simulated" and plan.predicted is not None
    promise = None if plan.status == "unmeasured" else plan.predicted if simulated else plan.measured or plan.predicted
    planned = plan.environment.device.kind if plan.environment is not None else None
    peak, parts, kept = measured.peak_bytes, [format_bytes(measured.peak_bytes)], list[bool]()
    if promise is not None:
        change = words.share(peak / promise.peak_bytes - 1, signed=True)
        more = f" for {simulated_for(plan)} ({change})" if simulated else ""
        parts.append(f"{'simulated' if simulated else 'promised'} {format_bytes(promise.peak_bytes)}{more}")
        slack = SIMULATED_PEAK_SLACK if simulated and planned != "cpu" else PEAK_SLACK
        kept.append(peak <= promise.peak_bytes * (1 + slack))
    if plan.budget is not None:
        parts.append(f"budget {format_bytes(plan.budget.whole)}")
        kept.append(peak <= plan.budget.whole)
    if simulated and planned is not None and kind is not None and planned != kind:
        parts.append("another kind of device, so the two are not compared")
        kept.clear()
    elif not kept:
        parts.append("nothing was promised")
    return _check("peak", all(kept) if kept else None, ", ".join(parts))


def judge_time(plan: Plan, measured: Measurement, same_device: bool) -> Check:
    """The measured step time against the promised one, where both come from the same kind of device."""
    detail, kept = "nothing measured was promised", None
    if plan.status == "simulated" and plan.predicted is not None and (predicted := plan.predicted.step_seconds):
        error = f"({words.share(measured.step_seconds / predicted - 1, signed=True)}); a simulation is no promise"
        detail = f"simulated {words.seconds(predicted)} for {simulated_for(plan)} {error}"
    elif plan.status == "measured" and (promise := plan.measured) is not None:
        detail = f"promised {words.step_time(promise)}{'' if same_device else ' on another device'}"
        limit = promise.step_seconds * (1 + TIME_SLACK + promise.noise + measured.noise)
        kept = measured.step_seconds <= limit if same_device else None
    return _check("step time", kept, f"{words.step_time(measured)}, {detail}")


def judge_ratio(plan: Plan, measured: Measurement, name: str, reference: Measurement, ratio: Interval) -> Check:
    """The step time as a multiple of a baseline's, measured interleaved, against the same ratio as promised.

    ``reference`` is what was measured of that plan when ``plan`` was made. Fails only where the ratio is surely worse.
    """
    assert plan.measured is not None
    promise = plan.measured.step_seconds / reference.step_seconds
    limit = promise * (1 + TIME_SLACK + plan.measured.noise + reference.noise)
    detail = (
        f"{words.step_time(measured)}, {ratio.value:.3f} times {name!r} [{ratio.low:.3f}, {ratio.high:.3f}]; promised "
        f"{words.seconds(plan.measured.step_seconds)}, {promise:.3f} times"
    )
    return _check("step time", ratio.low <= limit, detail)
