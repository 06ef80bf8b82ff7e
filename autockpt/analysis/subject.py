"""What is explained: a workload ghost-run with every uniform plan, op times, and what each choice costs.

Seconds rest on, best first: ops timed on the device, a roofline of a named device, common rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autockpt.analysis.explanation import Basis
from autockpt.cost import CostModel, cached_op_times, simulated_memory
from autockpt.cost.roofline import nominal_op_times, roofline_times
from autockpt.devices import get_device
from autockpt.errors import UsageError
from autockpt.measuring.environment import environment_of, environment_to_measure_in
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Graph,
    Hardware,
    Listener,
    OpTimes,
    Plan,
    Remake,
    Selective,
    WorkloadSpec,
    parse_budget,
)
from autockpt.shipped import list_hardware, load_hardware, load_space
from autockpt.tracing import Tracer, open_tracer
from autockpt.tuning.door import refuse_both
from autockpt.tuning.opening import Traced, live_settings, traced, traced_for, workload_key
from autockpt.workload import Step

SPACE = "knobs"


@dataclass(frozen=True)
class ExplainRequest:
    """What to explain: a plan, or what fits a budget, or plain training.

    Of the workload that ``spec`` describes, on ``device`` or on ``hardware`` as it is described; or of a live ``step``
    (``spec`` None), where its model is. ``plan_path`` is the plan's file or run directory.
    """

    spec: WorkloadSpec | None
    plan: Plan | None = None
    plan_path: Path | None = None
    budget: Budget | None = None
    device: str | None = None
    hardware: Hardware | None = None
    step: Step | None = None

    @property
    def described(self) -> WorkloadSpec:
        """The workload, in questions that no live step is asked."""
        assert self.spec is not None
        return self.spec

    @property
    def name(self) -> str:
        """Of the model."""
        return self.described.model if self.step is None else type(self.step.model).__name__

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, where it is known before anything is traced."""
        if self.budget is not None:
            return self.budget.budget_bytes
        return self.plan.budget.bytes if self.plan is not None and self.plan.budget is not None else None

    @property
    def torch_device(self) -> torch.device:
        """The device at hand, where no hardware is simulated."""
        if self.step is not None:
            return self.step.device
        return torch.device("cpu") if self.hardware is not None else get_device(self.device).torch_device


OTHER_WORKLOAD = "the workload is not the one that the plan was made for: its promise does not count"


def made_for(plan: Plan, spec: WorkloadSpec | None) -> bool:
    """Whether what a plan promises is about this workload; a plan that names none is taken at its word."""
    return plan.workload is None or plan.workload == spec


def hardware_for(name: str | None, device: str | None, plan: Plan | None) -> Hardware | None:
    """The device that is modelled: the one named, else the one that a simulated plan was simulated for; or None.

    Raises UsageError where that is not among those described, and for a device besides.
    """
    refuse_both(name, device)
    if name is not None:
        return load_hardware(name)
    if device is not None or plan is None or plan.source != "simulated":
        return None
    planned = simulated_hardware(plan)
    if planned is None:
        return None  # a dry run on the device at hand
    if planned not in list_hardware():
        raise UsageError(
            f"the plan was simulated for {planned}, which is not among the devices described here",
            remedy="Add --hardware with the file that describes it, or --device to explain the plan for this machine.",
        )
    return load_hardware(planned)


def simulated_hardware(plan: Plan) -> str | None:
    """The name of the hardware that a plan was simulated for; None for a plan of the device at hand."""
    return plan.environment.versions.get("simulated") if plan.environment is not None else None


def budget_for(
    asked: str | Budget | None,
    headroom: str | None,
    plan: Plan | None,
    spec: WorkloadSpec | None,
    simulated: str | None,
) -> Budget | None:
    """What a plan is held against: the budget as asked for, by default the plan's own as it stands (None).

    ``simulated`` is the name of the hardware that is simulated; None: the device at hand.
    A share is of the job's own peak, and ``auto`` all that a device has: of another workload or device they are another
    size. Raises UsageError for what is no budget, and for a headroom without one.
    """
    if asked is not None:
        return parse_budget(asked).with_headroom(headroom, simulated=simulated is not None)
    planned = None if plan is None else plan.budget
    if headroom is not None and planned is None:
        raise UsageError("a headroom is left free of a budget, and none was given", remedy="Give --budget, too.")
    if plan is None or planned is None:
        return None
    elsewhere = simulated != simulated_hardware(plan)
    again = elsewhere if planned.asked == "auto" else "%" in planned.asked and (elsewhere or not made_for(plan, spec))
    if headroom is None and not again:
        return None
    same = Budget(text=planned.asked, kind="bytes", size=planned.whole)
    return (parse_budget(planned.asked) if again else same).with_headroom(headroom or planned.headroom or "0%")


@dataclass(frozen=True)
class Times:
    """Op times with what they rest on, and that in words."""

    times: OpTimes
    basis: Basis
    note: str

    @classmethod
    def of(cls, times: OpTimes, when: str) -> Times:
        """Those of a simulated device; or measured ones, and ``when``."""
        if (simulated := times.environment.versions.get("simulated")) is not None:
            return cls(times, "modelled", f"seconds are modelled by a roofline of {simulated}, nothing was timed")
        return cls(times, "measured", f"op times were measured on {times.environment.device.name} {when}")


@dataclass(frozen=True)
class Subject:
    """An open workload. ``base`` is its plain step, ``uniform`` what all of its layers may do, ``choices`` are the
    plan's, by unit name."""

    question: ExplainRequest
    tracer: Tracer
    base: Graph
    uniform: tuple[str, ...]
    times: Times
    profiled: CostModel
    choices: Mapping[str, Choice] | None
    notes: tuple[str, ...] = ()

    @property
    def head(self) -> str | None:
        """Name of the model's output head."""
        return self.tracer.head.name if self.tracer.head is not None else None

    def needs(self, graph: Graph) -> int:
        """Bytes of the device that a ghost run needs, its context included."""
        predictor = self.profiled.predictor
        return predictor.needs(graph) if predictor.needs else graph.peak_bytes + predictor.device.overhead_bytes


def step_graph(question: ExplainRequest) -> Graph:
    """Every op of the described step, under the plan of a question that has one. Raises as ``open_subject`` does."""
    plan = question.plan
    with ExitStack() as stack:
        tracer, _ = open_tracer(stack, question.hardware, question.described, plan, device=question.torch_device)
        graph = tracer.trace(plan.choices_for(tracer.units, tracer.head) if plan is not None else None)
        return graph.model_copy(update={"notes": (*tracer.notes, *graph.notes)})


@contextmanager
def open_subject(question: ExplainRequest, listener: Listener) -> Iterator[Subject]:
    """Ghost-run and profile the workload of a question; the tracer's process ends with the block.

    Raises UsageError for a model without blocks, PlanError for a plan that does not fit the model, and what the tracer
    raises.
    """
    listener.stage("trace")
    with ExitStack() as stack:
        if question.step is not None:
            tracer = stack.enter_context(Tracer.from_step(question.step))
        else:
            asked = question.hardware, question.described, question.plan
            tracer, spec = open_tracer(stack, *asked, device=question.torch_device)
            question = replace(question, spec=spec)
        choices = question.plan.choices_for(tracer.units, tracer.head) if question.plan is not None else None
        of_head = SAVE if tracer.head is None else (choices or {}).get(tracer.head.name, SAVE)
        space, card = load_space(SPACE), question.hardware
        if card is None:
            found = traced(tracer, space, of_head=of_head, listener=listener)
        else:
            found = traced_for(stack, card, question.described, tracer, space, of_head=of_head, listener=listener)
        times, others = _times(question, found)
        listener.stage("profiling choices")
        needs = simulated_memory(question.hardware, question.budget_bytes) if question.hardware is not None else None
        # choices of the plan that no menu has by itself
        own = dict.fromkeys(c for c in (choices or {}).values() if isinstance(c, Selective | Remake))
        profiled = found.cost_model(times.times, used_by_others=others, extra=own, needs=needs)
        yield Subject(
            question=question,
            tracer=tracer,
            base=found.plain,
            uniform=tuple(found.uniform),
            times=times,
            profiled=profiled,
            choices=choices,
            notes=found.said,
        )


def _times(question: ExplainRequest, found: Traced) -> tuple[Times, int]:
    """Op times, and the bytes of the device that others hold: an earlier search's, else rates of common hardware."""
    heads = list(found.heads.graphs.values()) if found.heads is not None else []
    if question.hardware is not None:
        times = roofline_times(question.hardware, found.graphs)
        return Times.of(times.completed(roofline_times(question.hardware, heads)), ""), 0
    step, settings = question.step, dict[str, Any]()
    device = get_device(question.device if step is None else str(step.device))
    if step is None:
        environment = environment_to_measure_in(question.device)
    else:
        environment, settings = environment_of(device), live_settings(step, found.tracer)
    key = workload_key(question.spec, question.name, settings)
    lean = (found.uniform.get("recompute") or found.uniform["save"])[1]  # all that is timed; copies go by their rates
    if (cached := cached_op_times(environment, [lean, *heads], key)) is not None:
        return Times.of(cached, "by an earlier search"), device.used_by_others()
    note = (
        "seconds are modelled from FLOPs and bytes at nominal rates of common hardware: they rank choices and say "
        "little about this device (a search measures its op times; --hardware NAME models a device that is described)"
    )
    return Times(nominal_op_times(environment, *found.graphs, *heads), "nominal", note), device.used_by_others()
