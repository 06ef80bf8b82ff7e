"""Holding a plan against its promises with real steps: gradients, what is executed again, peak and step time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from autockpt.devices import Ways
from autockpt.errors import AutockptError, DeviceOutOfMemory, PlanError
from autockpt.history.promises import judge_peak, judge_ratio, judge_time, simulated_for
from autockpt.history.statistics import ratio_interval
from autockpt.measuring import LocalMeasurer, Measurer, StepRunner, WorkerMeasurer
from autockpt.measuring.conditions import seed_all
from autockpt.measuring.snapshot import Snapshot
from autockpt.policies import POLICIES, kept_by
from autockpt.runtime import (
    Observation,
    RunCounter,
    UnitRuns,
    attach,
    coarsest,
    coarsest_type,
    deterministically,
    digest_tensors,
    judge,
    kept_state,
    observe,
    sketch,
)
from autockpt.schema.choices import RECOMPUTE, Choice, dump_choice, parse_choice
from autockpt.schema.graph import Unit
from autockpt.schema.known import ALL, NONE, known_plans
from autockpt.schema.plan import Plan
from autockpt.schema.request import Listener, Silence
from autockpt.schema.sizes import format_bytes
from autockpt.schema.trial import Measurement
from autockpt.schema.verification import Check, VerifyReport
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Workload, discover_head, discover_units

_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}

Choices = Mapping[str, Choice]


def verify(
    plan: Plan | str | Path,
    workload: WorkloadSpec | Workload | None = None,
    *,
    device: str | None = None,
    listener: Listener | None = None,
    measurer: Measurer | None = None,
    steps: int = 10,
) -> VerifyReport:
    """Run a plan's training steps beside plain ones and hold the plan against what it promises.

    ``workload`` defaults to what the plan was made for. A spec is run in a worker process; a live workload in this one,
    whose state is restored. ``measurer`` replaces either. ``steps`` cycles are timed.

    Checks, in order: *gradients* of two steps bit-equal with plain training (where a choice is not exact: equal within
    a tolerance, and said so), with losses, buffers and random states (at
    full shape where plain training fits, else at the largest shape at which it does, and against recomputing every
    layer at full shape); *recomputed ops* by unit as the plan says; *peak* and *step time* as promised (in turns with
    saving or recomputing everything, where that was measured for the plan and fits: a slow day slows both).

    Raises PlanError where the plan does not belong to the model, or does not say what to run.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    subject = workload if workload is not None else plan.workload
    if subject is None and measurer is None:
        raise PlanError(
            "the plan does not say which training step it was made for",
            remedy="Name it: --model, --batch-size, --seq-len and what else your step uses.",
        )
    with _open(subject, device, measurer, plan) as runs:
        return _Verification(plan, subject, runs, device, listener or Silence(), steps).report()


@contextmanager
def _open(
    subject: WorkloadSpec | Workload | None,
    device: str | None,
    given: Measurer | None,
    plan: Plan,
) -> Iterator[Measurer]:
    if given is not None:
        yield given
        return
    assert subject is not None
    if isinstance(subject, WorkloadSpec):
        made = WorkerMeasurer(subject, device, host_budget=plan.host_budget_bytes, compile=plan.compile)
    else:
        made = LocalMeasurer(subject, host_budget=plan.host_budget_bytes, compile=plan.compile)
    try:
        yield cast(Measurer, made)
    finally:
        made.close()


class _Verification:
    """One run of all checks."""

    def __init__(
        self,
        plan: Plan,
        subject: WorkloadSpec | Workload | None,
        measurer: Measurer,
        device: str | None,
        listener: Listener,
        steps: int,
    ) -> None:
        self.plan, self.subject, self.measurer = plan, subject, measurer
        self.device, self.listener, self.steps = device, listener, steps
        self.rounds = max(3, steps // 2)
        self.notes: list[str] = []

    def report(self) -> VerifyReport:
        self.listener.stage("build the model")
        described = self._call("describe_units", {})
        units = [Unit.model_validate(u) for u in described["units"]]
        head = described.get("head")
        output_head = None if head is None else Unit.model_validate(head)
        self.choices = self.plan.choices_for(units, output_head)
        self.blocks = [unit.name for unit in units if unit.role == "block"]
        if self.plan.status_reason:
            self.notes.append(f"the plan is unmeasured: {self.plan.status_reason}")
        if self.plan.status == "simulated":
            here = self.measurer.environment.device.name
            self.notes.append(
                f"what the plan promises was simulated for {simulated_for(self.plan)}; it was never measured. "
                f"Here it ran on {here}. `autockpt search --resume` makes a measured plan from it."
            )
        checks = [*self._gradients(), self._reruns(), *self._promises()]
        return VerifyReport(checks=tuple(checks), notes=tuple(self.notes))

    @property
    def _compiled(self) -> bool:
        return self.plan.compile is not None

    def _call(self, function: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self.measurer.call(f"{__name__}:{function}", payload)

    # --- gradients

    def _gradients(self) -> Iterator[Check]:
        self.listener.stage("compare gradients with plain training")
        try:
            yield compare_on(self.measurer, "gradients", self.choices, None, compiled=self._compiled)
            return
        except DeviceOutOfMemory as error:
            self.notes.append(f"plain training does not fit at full shape: {error.message}")
        yield self._smaller_shape()
        self.listener.stage("compare gradients with recomputing every layer")
        everything = dict.fromkeys(self.blocks, RECOMPUTE)
        try:
            yield compare_on(
                self.measurer, "gradients at full shape", self.choices, everything, compiled=self._compiled
            )
        except DeviceOutOfMemory as error:
            yield Check(name="gradients at full shape", state="failed", detail=f"out of memory: {error.message}")

    def _smaller_shape(self) -> Check:
        """Against plain training, at the largest halved shape at which that fits."""
        name = "gradients at a smaller shape"
        if not isinstance(self.subject, WorkloadSpec):
            return Check(name=name, state="skipped", detail="a live workload has one shape only")
        settings = getattr(self.measurer, "settings", {})
        for spec in smaller_shapes(self.subject, settings.get("batch_size"), settings.get("seq_len")):
            shape = f"batch {spec.batch_size}" + (f" × {spec.seq_len}" if spec.seq_len else "")
            self.listener.stage(f"compare gradients with plain training at {shape}")
            rest = getattr(self.measurer, "rest", None)
            if rest is not None:
                rest()  # two models would share the device
            try:
                with _open(spec, self.device, None, self.plan) as measurer:
                    check = compare_on(measurer, name, self.choices, None, compiled=self._compiled)
                    return check.model_copy(update={"detail": f"{shape}: {check.detail}"})
            except DeviceOutOfMemory:
                continue
        return Check(name=name, state="skipped", detail="plain training fits at no shape")

    # --- recomputed ops

    def _reruns(self) -> Check:
        if self.plan.compile is not None:
            detail = "in compiled graphs, where single ops are not seen; the peak shows what they keep"
            return Check(name="recomputed ops", state="skipped", detail=detail)
        self.listener.stage("count recomputed ops")
        wired = {name: dump_choice(choice) for name, choice in self.choices.items()}
        try:
            found = self._call("count_runs", {"choices": wired})["units"]
        except DeviceOutOfMemory as error:
            return Check(name="recomputed ops", state="failed", detail=f"out of memory: {error.message}")
        return judge_runs(self.choices, {name: UnitRuns.model_validate(runs) for name, runs in found.items()})

    # --- peak and step time

    def _promises(self) -> Iterator[Check]:
        self.listener.stage("measure peak and step time")
        budget = self.plan.budget.bytes if self.plan.budget is not None else None
        try:
            measured = self.measurer.measure(self.choices, steps=self.steps, budget_bytes=budget)
        except DeviceOutOfMemory as error:
            yield Check(name="peak", state="failed", detail=f"out of memory: {error.message}")
            yield Check(name="step time", state="skipped", detail="no step could be timed")
            return
        yield judge_peak(self.plan, measured, self.measurer.environment.device.kind)
        yield self._step_time(measured)

    def _step_time(self, measured: Measurement) -> Check:
        """Beside a well-known plan where one fits: a machine that is slower today slows both alike."""
        same = self.plan.environment is not None and self.plan.environment.device == self.measurer.environment.device
        alone = judge_time(self.plan, measured, same)
        if alone.state == "skipped":
            return alone
        promised = {row.name: row.measured for row in self.plan.baselines if row.measured is not None}
        plans = known_plans(self.blocks, (RECOMPUTE.kind,))
        for name in (NONE, ALL):
            if name not in promised:
                continue
            self.listener.stage(f"time the plan beside {name!r}")
            try:
                times = self.measurer.compare({"plan": self.choices, name: plans[name]}, rounds=self.rounds)
            except DeviceOutOfMemory:
                continue
            ratio = ratio_interval(times["plan"], times[name], robust=True)
            return judge_ratio(self.plan, measured, name, promised[name], ratio)
        return alone


# --- verdicts ---------------------------------------------------------------------------------------------------------


def smaller_shapes(spec: WorkloadSpec, batch_size: int | None, seq_len: int | None) -> Iterator[WorkloadSpec]:
    """The spec with its batch halved down to one row, then its sequence down to 64 tokens; the largest first."""
    batch_size = spec.batch_size or batch_size or 1
    seq_len = spec.seq_len or seq_len
    while batch_size > 1:
        batch_size //= 2
        yield spec.model_copy(update={"batch_size": batch_size, "seq_len": seq_len})
    while seq_len is not None and seq_len >= 128:
        seq_len //= 2
        yield spec.model_copy(update={"batch_size": batch_size, "seq_len": seq_len, "pad_to": None})


def compare_on(
    measurer: Measurer, name: str, choices: Choices, reference: Choices | None, *, compiled: bool = False
) -> Check:
    """Compare two steps under ``choices`` with two under ``reference`` (None: plain training).

    Bit by bit, or within rounding where a choice is not exact or steps are compiled; those with each other.

    Passes DeviceOutOfMemory on where the *reference* does not fit; a plan that does not fit has failed.
    """

    sketched = compiled or not all(choice.exact for choice in choices.values())

    def run(which: Choices | None, deterministic: bool) -> Observation:
        wired = None if which is None else {n: dump_choice(c) for n, c in which.items()}
        payload = {"choices": wired, "deterministic": deterministic, "sketched": sketched}
        return Observation.model_validate(measurer.call(f"{__name__}:observe_steps", payload))

    deterministic = False
    first, second = run(reference, False), run(reference, False)
    if first.differences(second):
        deterministic = True
        first, second = run(reference, True), run(reference, True)
    try:
        planned = run(choices, deterministic)
    except DeviceOutOfMemory as error:
        return Check(name=name, state="failed", detail=f"the plan runs out of memory: {error.message}")
    except AutockptError as error:
        return Check(name=name, state="failed", detail=error.message)
    result = judge(first, second, planned, deterministic)
    if compiled and not result.equal and _draws(first):
        detail = "compiled code draws random numbers in an order of its own under every plan; switch dropout off"
        return Check(name=name, state="skipped", detail=detail)
    words = "plain training" if reference is None else "recomputing every layer"
    return Check(name=name, state="passed" if result.equal else "failed", detail=result.describe(words))


def _draws(observed: Observation) -> bool:
    """Whether the steps draw random numbers: both begin where the one before ended."""
    states = {digest for name, digest in observed.digests.items() if "random state" in name}
    return len(states) > 1


def judge_runs(choices: Choices, found: Mapping[str, UnitRuns]) -> Check:
    """Whether every unit executed again what its choice says, and nothing of what that keeps (but for outputs that were
    changed in place). Units whose output needs no gradient are left out."""
    wrong: list[str] = []
    again = forward = moved = counted = named = kept = 0
    for name, choice in choices.items():
        runs = found.get(name, UnitRuns())
        moved += runs.moved_bytes
        if not runs.trains:
            continue
        counted += 1
        forward += runs.forward
        again += runs.again
        least, most = POLICIES[choice.kind].reruns(choice, runs.forward)
        if not least <= runs.again <= most:
            wrong.append(f"{name} ({choice}: {runs.again} of {runs.forward})")
        elif kept_by(choice) and not runs.ops_again:
            wrong.append(f"{name} ({choice}: nothing runs again, so everything is kept)")
        elif runs.named_again > runs.changed:
            wrong.append(f"{name} ({choice}: {runs.named_again} of {runs.named} that it keeps run again)")
        named += runs.named
        kept += runs.named - runs.named_again
    sent = f", {format_bytes(moved)} moved off the device" if moved else ""
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Check(name="recomputed ops", state="failed", detail=f"not as planned: {', '.join(wrong[:3])}{more}")
    if not counted or not forward:
        detail = "no unit executes matrix products, attentions or convolutions that take part in backward"
        return Check(name="recomputed ops", state="skipped", detail=detail)
    detail = f"{again} of {forward} matrix products, attentions and convolutions in {counted} units run again{sent}"
    if named:
        detail += f"; {kept} of {named} outputs that are to be kept are not made again"
    return Check(name="recomputed ops", state="passed", detail=detail)


# --- beside the model: run there by Measurer.call ---------------------------------------------------------------------


def describe_units(runner: StepRunner, payload: dict[str, Any]) -> dict[str, Any]:
    """The units of the runner's model, and its output head."""
    model = runner.workload.model
    head = discover_head(model)
    return {
        "units": [unit.model_dump(mode="json") for unit in discover_units(model)],
        "head": None if head is None else head.model_dump(mode="json"),
    }


def observe_steps(runner: StepRunner, payload: dict[str, Any]) -> dict[str, Any]:
    """An Observation of two steps: under ``payload["choices"]``, or plainly where that is None."""
    workload = runner.workload
    choices = None if payload["choices"] is None else _choices(payload["choices"])
    what = "plain training" if choices is None else "the plan"
    sketched = bool(payload.get("sketched"))

    def observed() -> Observation:
        with (
            runner.session(choices),
            runner.compiling(choices or {}),
        ):
            if workload.full_step is not None:
                return _observe_full_steps(runner, sketched)
            seed_all(_seed(workload), runner.device.torch_device)
            if runner.compiler is None:
                return observe(workload.model, _forward_backward(workload), sketched=sketched)
            # what asks every module for its types would be compiled with it
            seen = observe(workload.model, _forward_backward(workload), sketched=sketched, typed=False)
            return seen.model_copy(update={"coarsest": coarsest(_types(workload))})

    with runner.attached({}, what=what, compiled=False):
        return (deterministically(observed) if payload.get("deterministic") else observed()).model_dump()


def count_runs(runner: StepRunner, payload: dict[str, Any]) -> dict[str, Any]:
    """What every unit executes in one step under ``payload["choices"]``, once and again, and moves off the device."""
    workload = runner.workload
    choices = _choices(payload["choices"])
    counter = RunCounter(workload.model, choices)  # with the choices: it counts what they keep
    ways = counter.transports(Ways(runner.host_budget))
    with runner.attached({}, what="the plan"), attach(workload.model, choices, transport=ways):
        seed_all(_seed(workload), runner.device.torch_device)
        with _restored(workload), counter.counting():
            workload.full_step() if workload.full_step is not None else workload.forward_backward()
    return {"units": {name: runs.model_dump() for name, runs in counter.result().items()}}


def _observe_full_steps(runner: StepRunner, sketched: bool) -> Observation:
    """Two whole cycles of the user's own; what they leave behind in weights and buffers."""
    workload = runner.workload
    assert workload.full_step is not None
    digests: dict[str, str] = {}
    sketches: dict[str, tuple[float, ...]] = {}
    with _restored(workload), coarsest_type(workload.model) as types:
        seed_all(_seed(workload), runner.device.torch_device)
        for i in (1, 2):
            workload.full_step()
            state = {**dict(workload.model.named_parameters()), **dict(workload.model.named_buffers())}
            digests |= {f"step {i}: {name}": digest for name, digest in digest_tensors(state).items()}
            if sketched:
                numbers = {n: t for n, t in state.items() if t.is_floating_point()}
                sketches |= {f"step {i}: {name}": sketch(tensor) for name, tensor in numbers.items()}
    return Observation(digests=digests, norms={}, sketches=sketches, coarsest=coarsest(types))


@contextmanager
def _restored(workload: Workload) -> Iterator[None]:
    """A user's own cycle changes weights: all of it is put back. Ours leaves only gradients and buffers behind."""
    if workload.full_step is None:
        with kept_state(workload.model):
            yield
        return
    snapshot = Snapshot(workload)
    try:
        yield
    finally:
        snapshot.restore()


def _forward_backward(workload: Workload) -> Callable[[Callable[[], None]], Tensor]:
    def run(between: Callable[[], None]) -> Tensor:
        return workload.forward_backward(lambda phase: between() if phase == "backward" else None)

    return run


def _types(workload: Workload) -> list[str]:
    """The floating point types of a model's weights and of its autocast."""
    autocast = workload.spec.autocast if workload.spec is not None else None
    types = {str(p.dtype).removeprefix("torch.") for p in workload.model.parameters() if p.is_floating_point()}
    return sorted(types) + ([_AUTOCAST.get(str(autocast), "bfloat16")] if autocast else [])


def _choices(wired: Mapping[str, Any]) -> dict[str, Choice]:
    return {name: parse_choice(choice) for name, choice in wired.items()}


def _seed(workload: Workload) -> int:
    return workload.spec.seed if workload.spec is not None else 0
