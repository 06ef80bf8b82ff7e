"""Holding a plan against its promises with real steps: gradients, what is executed again, peak and step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autockpt.errors import AutockptError, ConflictError, DeviceOutOfMemory, PlanError, RerunMismatch
from autockpt.history.promises import OTHER_WORKLOAD, judge_peak, judge_ratio, judge_time, made_for, simulated_for
from autockpt.history.statistics import Interval, ratio_interval
from autockpt.history.trialplan import plan_file
from autockpt.measuring import LocalMeasurer, Measurer, WorkerMeasurer
from autockpt.measuring.base import beats_counted
from autockpt.runtime import Observation, Proof, UnitRuns, judge, observe_reference
from autockpt.schema.choices import RECOMPUTE, Choice, dump_choices
from autockpt.schema.graph import Unit
from autockpt.schema.known import ALL, NONE, known_plans
from autockpt.schema.plan import Plan
from autockpt.schema.request import Listener, Silence
from autockpt.schema.trial import Measurement
from autockpt.schema.verification import Check, VerifyReport
from autockpt.schema.workload import WorkloadSpec
from autockpt.verification.checks import judge_proof, judge_runs, smaller_shapes
from autockpt.workload import Step

BESIDE = "autockpt.verification.beside"
OBSERVED = 3
"""Observations that gradients are compared by: two of the reference, which should repeat itself, and the plan's."""


def verify(
    plan: Plan | str | Path,
    workload: WorkloadSpec | Step | None = None,
    *,
    device: str | None = None,
    listener: Listener | None = None,
    measurer: Measurer | None = None,
    steps: int = 10,
) -> VerifyReport:
    """Run a plan's training steps and plain ones, and hold the plan against what it promises.

    ``workload`` defaults to what the plan was made for. A spec is run in a worker process; a live workload in this one,
    whose state is restored. ``measurer`` replaces either. ``steps`` cycles are timed.

    Checks, in order: *gradients* of two steps bit-equal with plain training (where a choice is not exact: equal within
    a tolerance, and said so), with losses, buffers and random states (at
    full shape where plain training fits, else at the largest shape at which it does, and against recomputing every
    layer at full shape); *recomputed ops* by unit as the plan says; *peak* and *step time* as promised (alternated with
    saving or recomputing everything, where that was measured for the plan and fits: a slow day slows both).

    Of a plan with sets of choices for smaller batches every set is held against its own promise, at its own length; of
    a live workload, whose batch is as it is, smaller sets' gradients alone.

    Steps are compiled as those that the plan was made for.

    Raises PlanError where the plan does not belong to the model, or does not say what to run; UsageError where nothing
    can be compiled here.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan_file(Path(plan)))
    subject = workload if workload is not None else plan.workload
    if subject is None and measurer is None:
        raise PlanError(
            "the plan does not say which training step it was made for",
            remedy="Name it: --model, --batch-size, --seq-len and what else your step uses.",
        )
    if isinstance(subject, WorkloadSpec) and (options := subject.simulated_only()):
        said = ", ".join(f"{option} {value}".strip() for option, value in options.items())
        raise PlanError(
            f"the plan was simulated for {said}, which real steps of one process do not follow",
            remedy="Train with it: gradients are checked there, and print(handle.sentinels) says how many. Or search "
            "without these options, and verify that plan.",
        )
    with _open(subject, device, measurer, plan) as runs:
        asked = (subject, runs, device, listener or Silence(), steps)
        report = _Verification(_for(plan, subject), *asked).report()
        if measurer is not None or not isinstance(subject, WorkloadSpec):
            for each in plan.sets[:-1]:
                report = _with_set(report, each, _Verification(each, *asked).gradients())
            return report
    for each in plan.sets[:-1]:
        length = each.workload.seq_len if each.workload is not None else None
        spec = subject.model_copy(update={"seq_len": length or subject.seq_len})
        found = verify(each, spec, device=device, listener=listener, steps=steps)
        report = _with_set(report, each, found)
    return report


def _for(plan: Plan, subject: WorkloadSpec | Step | None) -> Plan:
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


def _open(
    subject: WorkloadSpec | Step | None, device: str | None, given: Measurer | None, plan: Plan
) -> AbstractContextManager[Measurer]:
    """What measures the subject: the one given, which stays open, or one of its own."""
    if given is not None:
        return nullcontext(given)
    assert subject is not None
    if isinstance(subject, WorkloadSpec):
        return WorkerMeasurer(subject, device, host_budget=plan.host_budget_bytes, compile=plan.compile)
    return LocalMeasurer(subject, host_budget=plan.host_budget_bytes, compile=plan.compile)


@dataclass
class _Verification:
    """One run of all checks."""

    plan: Plan
    subject: WorkloadSpec | Step | None
    measurer: Measurer
    device: str | None
    listener: Listener
    steps: int
    measured: Measurement | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Of interleaved steps."""
        return max(3, self.steps // 2)

    def report(self) -> VerifyReport:
        here = self.measurer.environment.device.name
        if self.plan.status == "simulated":
            self.listener.note(
                f"the plan was simulated for {simulated_for(self.plan)}; this is {here}: gradients are compared here, "
                "in as large a step as its memory and time allow"
            )
        self._look_at_the_model()
        if self.plan.status_reason:
            self.notes.append(f"the plan is unmeasured: {self.plan.status_reason}")
        if isinstance(self.subject, WorkloadSpec) and not made_for(self.plan, self.subject):
            self.notes.append(OTHER_WORKLOAD)
        if self.plan.status == "simulated":
            self.notes.append(
                f"what the plan promises was simulated for {simulated_for(self.plan)}; it was never measured. "
                f"Here it ran on {here}. `autockpt search --resume` makes a measured plan from it."
            )
        checks = (*self._gradients(), *self._reruns(), *self._promises())
        return VerifyReport(checks=checks, notes=tuple(self.notes), measured=self.measured)

    def gradients(self) -> VerifyReport:
        """The first check alone."""
        self._look_at_the_model()
        return VerifyReport(checks=tuple(self._gradients()))

    def _look_at_the_model(self) -> None:
        self.listener.stage("build the model")
        described = self._call(
            "describe_units", {"named": self.plan.settings.get("units"), "patterns": list(self.plan.choices)}
        )
        units = [Unit.model_validate(u) for u in described["units"]]
        head = described.get("head")
        output_head = None if head is None else Unit.model_validate(head)
        self.choices = self.plan.choices_for(units, output_head)
        self.blocks = [unit.name for unit in units if unit.role == "block"]

    @property
    def _compiled(self) -> bool:
        return self.plan.compile is not None

    def _call(self, function: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self.measurer.call(f"{BESIDE}:{function}", payload)

    # --- gradients

    def _gradients(self) -> Iterator[Check]:
        self.listener.stage("compare gradients with plain training", OBSERVED)
        try:
            yield self._compared("gradients", self.measurer, None)
            return
        except DeviceOutOfMemory as error:
            self.notes.append(f"plain training does not fit at full shape: {error.message}")
        yield self._smaller_shape()
        self.listener.stage("compare gradients with recomputing every layer", OBSERVED)
        everything = dict.fromkeys(self.blocks, RECOMPUTE)
        try:
            yield self._compared("gradients at full shape", self.measurer, everything)
        except DeviceOutOfMemory as error:
            yield Check(name="gradients at full shape", state="failed", detail=f"out of memory: {error.message}")

    def _compared(self, name: str, measurer: Measurer, reference: Mapping[str, Choice] | None) -> Check:
        """Compare two steps under the plan with two under ``reference`` (None: plain training).

        Bit by bit, or within rounding where a choice is not exact or steps are compiled; those with each other. The
        listener sees the observations pass, ``OBSERVED`` of them in each of its stages.

        Passes DeviceOutOfMemory on where the *reference* does not fit; a plan that does not fit has failed.
        """
        sketched = self._compiled or not all(choice.exact for choice in self.choices.values())

        def run(which: Mapping[str, Choice] | None, deterministic: bool) -> Observation:
            wired = None if which is None else dump_choices(which)
            payload = {"choices": wired, "deterministic": deterministic, "sketched": sketched}
            observed = Observation.model_validate(measurer.call(f"{BESIDE}:observe_steps", payload))
            self.listener.advance()
            return observed

        def again() -> None:
            self.listener.stage("compare gradients by deterministic kernels", OBSERVED)

        twice = observe_reference(partial(run, reference), again)
        try:
            planned = run(self.choices, twice.deterministic)
        except DeviceOutOfMemory as error:
            return Check(name=name, state="failed", detail=f"the plan runs out of memory: {error.message}")
        except AutockptError as error:
            return Check(name=name, state="failed", detail=error.message)
        result = judge(twice, planned)
        if self._compiled and not result.equal and twice.first.draws:
            detail = "compiled code draws random numbers in an order of its own under every plan; switch dropout off"
            return Check(name=name, state="skipped", detail=detail)
        words = "plain training" if reference is None else "recomputing every layer"
        said = (f"{words} compiled alike", "compilers round in their own way") if self._compiled else (words,)
        return Check(name=name, state="passed" if result.equal else "failed", detail=result.describe(*said))

    def _smaller_shape(self) -> Check:
        """Against plain training, at the largest halved shape at which that fits."""
        name = "gradients at a smaller shape"
        if not isinstance(self.subject, WorkloadSpec):
            return Check(name=name, state="skipped", detail="a live workload has one shape only")
        settings = getattr(self.measurer, "settings", {})
        for spec in smaller_shapes(self.subject, settings.get("batch_size"), settings.get("seq_len")):
            shape = f"batch {spec.batch_size}" + (f" × {spec.seq_len}" if spec.seq_len else "")
            self.listener.stage(f"compare gradients with plain training at {shape}", OBSERVED)
            rest = getattr(self.measurer, "rest", None)
            if rest is not None:
                rest()  # two models would share the device
            try:
                with _open(spec, self.device, None, self.plan) as measurer:
                    check = self._compared(name, measurer, None)
                    return check.model_copy(update={"detail": f"{shape}: {check.detail}"})
            except DeviceOutOfMemory:
                continue
        return Check(name=name, state="skipped", detail="plain training fits at no shape")

    # --- recomputed ops

    def _reruns(self) -> Iterator[Check]:
        if self._compiled:
            detail = "in compiled graphs, where single ops are not seen; the peak shows what they keep"
            yield Check(name="recomputed ops", state="skipped", detail=detail)
            return
        self.listener.stage("count recomputed ops")
        try:
            found = self._call("count_runs", {"choices": dump_choices(self.choices)})
        except DeviceOutOfMemory as error:
            yield Check(name="recomputed ops", state="failed", detail=f"out of memory: {error.message}")
            return
        except RerunMismatch as error:
            yield Check(name="sentinels", state="failed", detail=error.message)
            return
        yield judge_runs(self.choices, {name: UnitRuns.model_validate(runs) for name, runs in found["units"].items()})
        yield judge_proof(Proof.model_validate(found["proof"]))

    # --- peak and step time

    def _promises(self) -> Iterator[Check]:
        budget_bytes = self.plan.budget.whole if self.plan.budget is not None else None
        yield from self._measure(budget_bytes)
        if self.measured is not None:
            yield judge_peak(self.plan, self.measured, self.measurer.environment.device.kind)
            yield self._step_time(self.measured)

    def _measure(self, budget_bytes: int | None) -> Iterator[Check]:
        """Fill ``measured``; or the checks that failed because it does not run."""
        try:
            self.measured = self._timed("measure peak and step time", self.choices, budget_bytes)
        except (DeviceOutOfMemory, ConflictError) as error:
            why = f"out of memory: {error.message}" if isinstance(error, DeviceOutOfMemory) else error.message
            yield Check(name="peak", state="failed", detail=why)
            yield Check(name="step time", state="skipped", detail="no step could be timed")

    def _timed(self, stage: str, choices: Mapping[str, Choice], budget_bytes: int | None = None) -> Measurement:
        """A stage that measures a plan; its steps are seen to pass."""
        self.listener.stage(stage, self.steps)
        with beats_counted(self.measurer, self.listener):
            return self.measurer.measure(choices, steps=self.steps, budget_bytes=budget_bytes)

    def _step_time(self, measured: Measurement) -> Check:
        """Beside a well-known plan where one fits: a machine that is slower today slows both alike."""
        same = self.plan.environment is not None and self.plan.environment.device == self.measurer.environment.device
        alone = judge_time(self.plan, measured, same)
        if alone.state == "skipped":
            return alone
        promised = {row.name: row.measured for row in self.plan.baselines if row.measured is not None}
        for name in (NONE, ALL):
            if name not in promised:
                continue
            try:
                return judge_ratio(self.plan, measured, name, promised[name], self._beside(name))
            except DeviceOutOfMemory:
                continue
        return alone

    def _beside(self, name: str) -> Interval:
        """The plan's step time as a multiple of a well-known one's, interleaved. Passes DeviceOutOfMemory on."""
        self.listener.stage(f"time the plan and {name!r}, interleaved", 2 * self.rounds)
        other = known_plans(self.blocks, (RECOMPUTE.kind,))[name]
        with beats_counted(self.measurer, self.listener):
            times = self.measurer.compare({"plan": self.choices, name: other}, rounds=self.rounds)
        return ratio_interval(times["plan"], times[name])
