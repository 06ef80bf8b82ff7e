"""What is explained: a workload ghost-run with every uniform plan, op times, and what each choice costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autockpt.devices import get_device, process_environment
from autockpt.errors import UsageError
from autockpt.explain.times import Times, of_device, of_hardware
from autockpt.measuring import environment_of
from autockpt.profiling import Profiled, Uniform, build_profile, promised_bytes, tracer_for, uniform_graphs
from autockpt.schema import (
    Budget,
    Choice,
    Graph,
    Listener,
    OpTimes,
    Plan,
    Remake,
    Selective,
    WorkloadSpec,
    dump_choice,
    load_space,
)
from autockpt.schema.hardware import Hardware
from autockpt.tracing import Tracer
from autockpt.tuning.head import FixedTracer, Settled, nominal, settle

SPACE = "knobs"


@dataclass(frozen=True)
class Question:
    """What to explain: a plan, or what fits a budget, or plain training.

    On ``device``, or on ``hardware`` as it is described. ``plan_path`` is the plan's file or run directory.
    """

    spec: WorkloadSpec
    plan: Plan | None = None
    plan_path: Path | None = None
    budget: Budget | None = None
    device: str | None = None
    hardware: Hardware | None = None
    limits: bool = True

    @property
    def limit(self) -> int | None:
        """The budget in bytes, where it is known before anything is traced."""
        if self.budget is not None:
            return self.budget.size if self.budget.kind == "bytes" else None
        return self.plan.budget.bytes if self.plan is not None and self.plan.budget is not None else None

    def tracer(self, spec: WorkloadSpec, *, fallback: bool = True) -> Tracer:
        """A tracer of a workload on the device, or for the hardware, of this question."""
        if self.hardware is not None:
            return tracer_for(self.hardware, spec, fallback=fallback)
        return Tracer.from_spec(spec, device=get_device(self.device).torch_device, fallback=fallback)


@dataclass(frozen=True)
class Subject:
    """An open workload. ``choices`` are the plan's, by unit name; ``fixed`` those that every plan here has besides."""

    question: Question
    tracer: Tracer
    traces: Tracer | FixedTracer
    uniform: Uniform
    times: Times
    profiled: Profiled
    choices: Mapping[str, Choice] | None
    fixed: Mapping[str, Choice] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Choice kinds that this model takes."""
        return tuple(self.uniform)

    @property
    def head(self) -> str | None:
        """Name of the model's output head."""
        return self.tracer.head.name if self.tracer.head is not None else None

    def needs(self, graph: Graph) -> int:
        """Bytes of the device that a ghost run needs, its context included."""
        predictor = self.profiled.predictor
        return predictor.needs(graph) if predictor.needs else graph.peak_bytes + predictor.device.overhead_bytes

    @property
    def base(self) -> Graph:
        """The ghost run with every unit on save."""
        return self.uniform["save"][1]


@contextmanager
def open_subject(question: Question, listener: Listener) -> Iterator[Subject]:
    """Ghost-run and profile the workload of a question; the tracer's process ends with the block.

    Raises UsageError for a model without blocks, PlanError for a plan that does not fit the model, and what the tracer
    raises.
    """
    listener.stage("tracing")
    with question.tracer(question.spec) as tracer:
        blocks = tuple(u for u in tracer.units if u.role == "block")
        if not blocks:
            raise UsageError(
                "the model has no repeated blocks, so there is nothing to choose per layer",
                remedy="`autockpt trace` shows what its step holds. autockpt plans for members of an nn.ModuleList or "
                "nn.Sequential, and for transformers' layers.",
            )
        choices = question.plan.choices_for(tracer.units, tracer.head) if question.plan is not None else None
        fixed = {n: c for n, c in (choices or {}).items() if tracer.head is not None and n == tracer.head.name}
        if choices is None and question.budget is not None:
            uniform = uniform_graphs(tracer, blocks, load_space(SPACE).choices)
            listener.stage("weighing the output head")
            settled = _settled(question, question.budget, tracer, uniform)
            question, fixed = replace(question, budget=settled.budget), dict(settled.fixed)
            said = (settled.note,) if settled.note else ()
            uniform = {kind: (plan, settled.uniform[kind][1]) for kind, (plan, _) in uniform.items()}
            traces = FixedTracer(tracer, fixed) if fixed else tracer
        else:
            traces = FixedTracer(tracer, fixed) if fixed else tracer
            uniform, said = uniform_graphs(traces, blocks, load_space(SPACE).choices), ()
        times, others = _times(question, uniform, fixed)
        listener.stage("weighing choices")
        needs = promised_bytes(question.hardware, question.limit) if question.hardware is not None else None
        extra = _own_sets(choices or {})
        profiled = build_profile(traces, times.times, uniform, used_by_others=others, extra=extra, needs=needs)
        yield Subject(
            question=question,
            tracer=tracer,
            traces=traces,
            uniform=uniform,
            times=times,
            profiled=profiled,
            choices=choices,
            fixed=fixed,
            notes=(*said, *tracer.notes, *uniform["save"][1].notes, *_refused(uniform)),
        )


def _settled(question: Question, budget: Budget, tracer: Tracer, uniform: Uniform) -> Settled:
    """What the output head does in plans for a budget, as a search would decide it."""
    hardware, needs = question.hardware, None
    if hardware is not None:
        needs, times = promised_bytes(hardware, question.limit), partial(_modelled, hardware)
    else:
        device = get_device(question.device)
        environment = environment_of(device, {**process_environment(question.device), **os.environ})
        times = nominal(environment)

    def room() -> int:
        if hardware is not None:
            return hardware.memory_bytes
        return environment.device.capacity_bytes - device.used_by_others()

    def profiled() -> Profiled:
        return build_profile(tracer, times(uniform), uniform, needs=needs)

    plain = Settled({}, tracer, uniform, budget)
    space = load_space(SPACE)
    return settle(plain, tracer.head, space, times=times, room=room, profiled=profiled, inexact=False, needs=needs)


def _modelled(hardware: Hardware, uniform: Uniform) -> OpTimes:
    return of_hardware(hardware, uniform).times


def _times(question: Question, uniform: Uniform, fixed: Mapping[str, Choice]) -> tuple[Times, int]:
    """Op times, and the bytes of the device that others hold."""
    if question.hardware is not None:
        return of_hardware(question.hardware, uniform), 0
    device = get_device(question.device)
    environment = environment_of(device, {**process_environment(question.device), **os.environ})
    times = of_device(environment, uniform, workload_key(question.spec, fixed), question.plan_path)
    return times, device.used_by_others()


def workload_key(spec: WorkloadSpec, fixed: Mapping[str, Choice]) -> str:
    """What a search files op times under."""
    named = [{name: dump_choice(choice) for name, choice in fixed.items()}] if fixed else []
    return json.dumps([spec.model_dump(mode="json"), spec.model, *named], default=str)


def _own_sets(choices: Mapping[str, Choice]) -> tuple[Choice, ...]:
    """Choices of a plan that no menu has by itself."""
    return tuple(dict.fromkeys(c for c in choices.values() if isinstance(c, Selective | Remake)))


def _refused(uniform: Uniform) -> tuple[str, ...]:
    refused = [kind for kind in load_space(SPACE).choices if kind not in uniform]
    return (f"not for this model: {', '.join(refused)}",) if refused else ()
