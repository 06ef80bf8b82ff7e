"""A workload under a recorder in this process: build it, run the first cycle, then trace it with any choices.

Units are taken from the first cycle: which modules were called, in which order, and which of them run the same ops.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autockpt.checkpointing.recorded_call import RecordedUnit
from autockpt.devices.accelerator import without_context
from autockpt.devices.base import Transport
from autockpt.errors import AutockptError, GhostError, UsageError
from autockpt.interpreter import collection_paused, patched
from autockpt.policies.rematerialize import recipes_known
from autockpt.runtime import attach
from autockpt.schema.choices import SAVE, Choice, Remake
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.graph import Graph, Phase, Tier, Unit
from autockpt.schema.names import ancestors, fold, outermost
from autockpt.schema.plan import NEVER_CALLED
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.assemble import GraphSource, ModuleUnit, to_graph
from autockpt.tracing.collectives import pretend_ranks, sharded_as_ghosts
from autockpt.tracing.cuts import cuts_note, find_cuts
from autockpt.tracing.ghost import GhostMode
from autockpt.tracing.ghost_workload import ghost_copy, ghost_in_place, optimizers_on, untouched
from autockpt.tracing.kernels.cuda_kernels import AMPERE, Capability
from autockpt.tracing.kernels.flash_package import FLASH, NOTE, flash_on_ghosts
from autockpt.tracing.kernels.flex_attention import FLEX
from autockpt.tracing.location import optimizer_steps
from autockpt.tracing.memory import GhostMemory
from autockpt.tracing.recorder import RealRecorder, Recorder, RecordingTransport
from autockpt.workload import Step, build, discover_head, discover_units, step_failed
from autockpt.workload.build import refuse_liger_on
from autockpt.workload.factory import is_factory
from autockpt.workload.failures import location, summary

MICRO_BATCHES = 2
"""Micro-batches that are traced: gradients exist from the second on, and all further ones are like it."""
RECURRENT = (
    "Recurrent layers are counted as the CPU's kernels run them. On a GPU cuDNN runs whole stacks at once and keeps a "
    "reserve space for backward, whose size no one but cuDNN can tell (PyTorch's own shape function says 0): measure "
    "such a model on the card."
)


class FirstCycle(NamedTuple):
    """What the first cycle shows: the called units in order, the output head, modules that were called outside of
    these, and the workload's settings and notes."""

    units: tuple[Unit, ...]
    head: Unit | None
    outside: tuple[str, ...]
    settings: dict[str, Any]
    notes: tuple[str, ...]


class _Recorded(dict[tuple[str, Choice], RecordedUnit]):
    """Units by name and choice, with the recipes that traces have learned.

    Those of equal ``kinds`` run the same ops. So a new one begins with what the first of its kind knows; only numbers,
    such as its place among the layers, are its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, int] = {}
        self._firsts: dict[Any, RecordedUnit] = {}

    def __setitem__(self, key: tuple[str, Choice], unit: RecordedUnit) -> None:
        super().__setitem__(key, unit)
        name, choice = key
        first, numbers = self._firsts.setdefault((self.kinds.get(name, name), choice), unit), unit.numbers()
        unit.signatures |= {(*known[:2], numbers, *known[3:]): its for known, its in first.signatures.items()}

    def lacks(self, choices: Mapping[str, Choice]) -> bool:
        """Whether a choice is among these that no unit of the kind has learned from."""
        pairs = {(self.kinds.get(name, name), one) for name, one in choices.items() if isinstance(one, Remake)}
        return not pairs <= self._firsts.keys()

    @property
    def learned(self) -> int:
        """The number of calls that were recorded."""
        return len({signature for unit in self.values() for signature in unit.signatures.values()})


class TracedRun:
    """A workload that is cycled under a recorder; its ``first_cycle`` is known from the first cycle on."""

    source: GraphSource
    workload: Step
    first_cycle: FirstCycle

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recorded = _Recorded()

    def build(self, spec: WorkloadSpec, device: torch.device, capability: Capability | None = None) -> None:
        """Build the workload of ``spec`` as it would run on ``device``. Raises what ``workload.build`` raises.

        ``capability``: compute capability of the NVIDIA GPU whose kernels the step takes.
        """
        raise NotImplementedError

    def take(self, workload: Step) -> None:
        """Use a workload as it is, which changes its tensors and states: in a process with no other use for it."""
        raise NotImplementedError

    def trace(self, choices: Mapping[str, Choice]) -> Graph:
        """One cycle in the steady state with these choices attached (by unit name, in order of execution).

        Raises GhostError or WorkloadError where the step fails, PlanError or ConflictError where the choices cannot be
        attached.
        """
        with self._attached(choices), recipes_known(self._recorded):
            if self._forward_teaches and self._recorded.lacks(choices):
                self._cycle(forward_only=True)
            before = None
            while before != (learned := self._recorded.learned):
                before = learned  # until units have learned all their signatures
                self._cycle()
        self._recorder.try_kernels()
        return to_graph(self._recorder, self.workload, self._places, self.source, self.first_cycle.units)

    @property
    def _forward_teaches(self) -> bool:
        """Whether a forward without a backward teaches units as much as a cycle, and leaves nothing behind.

        What users' code does is not known, and FSDP2 would keep weights gathered until the backward.
        """
        spec = self.workload.spec
        return not (spec is None or is_factory(spec.model) or spec.shard or spec.stage)

    def _start(self, workload: Step) -> None:
        """The first cycle: optimizer states are born, and it shows which units there are."""
        self.workload = workload
        self._recorder.location.bind(workload.model)
        self._cycle()
        units, head = self._units(workload), discover_head(workload.model)
        self._places = [(path, unit_of(path, units)) for path in self._recorder.location.paths]
        if head is not None and unit_of(head.name, units):
            head = None  # inside of a unit, for which a choice is made
        taken = {unit.name for unit in units} | ({head.name} if head is not None else set())
        around = {outer for name in taken for outer in ancestors(name)}
        called = (self._recorder.location.paths[number] for number in self._recorder.location.order)
        outside = tuple(p for p in called if p and p not in around and taken.isdisjoint((p, *ancestors(p))))
        self.first_cycle = FirstCycle(units, head, outside, workload.settings, workload.notes)
        self._recorded.kinds = {unit.name: unit.kind for unit in units}

    def _units(self, workload: Step) -> tuple[Unit, ...]:
        """Units that the first cycle called: those that were asked for, else blocks, else the best cuts.

        Where they are not simply all blocks, the workload's settings name them or those that were never called, and a
        note says so.
        """
        there = discover_units(workload.model, workload.units)
        units, named = called_units(there, self._recorder), bool(workload.units)
        if not units and not named:
            places: list[ModuleUnit] = [(path, None) for path in self._recorder.location.paths]
            graph = to_graph(self._recorder, workload, places, self.source)
            called = {self._recorder.location.paths[number] for number in self._recorder.location.order}
            cuts = find_cuts(graph, called)
            if not cuts:
                return ()
            there, named = discover_units(workload.model, ",".join(cuts)), True
            units = called_units(there, self._recorder)
            workload.notes += (f"Nothing repeats in this model. {cuts_note(graph, cuts)}",)
        names = [unit.name for unit in units if unit.role == "block"]
        if not names:
            raise UsageError(
                f"units {workload.units!r}: none of these modules is called in the step",
                remedy="Name modules whose forward runs; `autockpt explain --ops` prints the module of every op.",
            )
        if named:
            workload.settings = {**workload.settings, "units": ",".join(fold(dict.fromkeys(names, "")))}
        reached = {unit.name for unit in units}
        if idle := outermost([unit.name for unit in there if unit.name not in reached]):
            workload.settings = {**workload.settings, NEVER_CALLED: ",".join(fold(dict.fromkeys(idle, "")))}
        return units

    @contextmanager
    def _attached(self, choices: Mapping[str, Choice]) -> Iterator[None]:
        if all(choice == SAVE for choice in choices.values()):
            yield
            return
        with attach(self.workload.model, choices, transport=self._transport, sentinels="off") as session:
            session.sentinels.in_mid_training = True  # which compares no memory: of ghosts there is none
            yield

    def _transport(self, device: torch.device, tier: Tier) -> Transport:
        queues = self._recorder.device_kind not in WITHOUT_STREAMS
        return RecordingTransport(self._kept, queues, self._recorder, tier)

    def _kept(self, source: Tensor) -> Callable[[], Tensor]:
        """A function that makes a device buffer with the bytes of a storage that is offloaded now."""
        raise NotImplementedError

    def _explained(self, error: BaseException) -> AutockptError:
        """The error for an exception of the step."""
        raise NotImplementedError

    def _cycle(self, forward_only: bool = False) -> None:
        """Record one cycle, without garbage collection, whose moment in a real step is arbitrary."""
        workload, recorder = self.workload, self._recorder
        recorder.restart()  # so that the collector need not visit the last recording
        gc.collect()

        def mark(phase: Phase) -> None:
            recorder.location.mark(phase)
            if workload.in_flight is not None and phase != "optimizer":
                recorder.begins.append(len(recorder.ops))
            if phase == "optimizer":
                recorder.hold(p.grad for p in workload.model.parameters())

        steps = nullcontext() if workload.full_step is None else optimizer_steps(mark)
        failure: AutockptError | None = None
        try:
            with collection_paused(), recorder.recording(), steps:
                if forward_only:
                    workload.forward(workload.batch)
                else:
                    workload.cycle(mark)
        except (Exception, SystemExit) as error:
            failure = self._explained(error)
        finally:
            workload.release_gradients()
        if failure is not None:  # raised here, so that it does not keep the step's frames and tensors alive
            raise failure


class GhostRun(TracedRun):
    """A workload of ghosts: no memory, no arithmetic.

    ``writable``: for a process that must survive a kernel that touches ghosts by mistake.
    ``threads`` are those of the simulated step.
    """

    source = "ghost"

    def __init__(self, *, writable: bool = False, threads: int = 1) -> None:
        self.mode = GhostMode(GhostMemory(writable=writable))
        self.mode.threads = threads
        self._around: list[Callable[[], AbstractContextManager[None]]] = []  # what a cycle runs in
        super().__init__(self.mode)

    def build(self, spec: WorkloadSpec, device: torch.device, capability: Capability | None = None) -> None:
        refuse_liger_on(spec, device)
        if spec.attn in FLASH and device.type == "cuda":
            self._around.append(partial(flash_on_ghosts, capability or AMPERE))
        if spec.shard is not None:
            pretend_ranks(spec.ranks)
        try:
            with self._imitating(), self._building():
                workload = build(_traced(spec), "cpu")
        except AutockptError as error:
            if self.mode.refused is None:
                raise
            raise GhostError(f"the workload cannot be built of ghosts: {error.message}", remedy=error.remedy) from None
        self._imitate(device, capability)
        workload.settings |= {"optimizer": spec.optimizer} if spec.optimizer == "adamw8bit" else {}
        workload.settings["device"] = str(device)
        ghost_in_place(workload, self.mode)
        if spec.attn in (*FLASH, FLEX):
            workload.notes += (NOTE.format(spec.attn),)
        self._start(workload)

    def take(self, workload: Step) -> None:
        self._imitate(workload.device)
        ghost_in_place(workload, self.mode)
        self._start(workload)

    def copy(self, workload: Step) -> None:
        """Run a copy of a workload, which itself does not change. Raises GhostError where that is not possible."""
        self._imitate(workload.device)
        twin = ghost_copy(workload, self.mode)
        self._around.append(partial(untouched, workload))
        self._start(twin)

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Build a workload out of ghosts within the block."""
        with patched(self.mode, "building", True), sharded_as_ghosts(self.mode.log), self.mode:
            yield

    def _start(self, workload: Step) -> None:
        workload.left_out = max(0, workload.accumulate - max(MICRO_BATCHES, 1 + (workload.in_flight or 0)))
        with self._imitating():
            super()._start(workload)
        if self.mode.device_kind == "cuda" and any(
            isinstance(module, torch.nn.RNNBase) for module in workload.model.modules()
        ):
            self.first_cycle = self.first_cycle._replace(notes=(*self.first_cycle.notes, RECURRENT))

    def trace(self, choices: Mapping[str, Choice]) -> Graph:
        with self._imitating():
            return super().trace(choices)

    @contextmanager
    def _imitating(self) -> Iterator[None]:
        """The contexts that cycles run in."""
        with ExitStack() as stack:
            for enter in self._around:
                stack.enter_context(enter())
            yield

    def _imitate(self, device: torch.device, capability: Capability | None = None) -> None:
        self._around.append(partial(optimizers_on, device))
        self.mode.device_kind = device.type
        if device.type == "cuda":
            self.mode.capability = capability or capability_at(device) or AMPERE

    def _kept(self, source: Tensor) -> Callable[[], Tensor]:
        return partial(self.mode.allocate, source.numel())

    def _explained(self, error: BaseException) -> AutockptError:
        if isinstance(error, AutockptError):
            return error
        place = f" at {found}" if (found := location(error)) else ""
        return GhostError(
            f"the step failed in the ghost run{place}, {self.mode.last_op}: {summary(error)}",
            remedy=f"{GhostError.default_remedy} Please report the model.",
        )


class RecordedRun(TracedRun):
    """A workload whose steps are real: its weights, optimizer states and random state move on with every cycle."""

    source = "recorded"

    def __init__(self, device: torch.device) -> None:
        super().__init__(RealRecorder(device))
        self._device = device

    def build(self, spec: WorkloadSpec, device: torch.device, capability: Capability | None = None) -> None:
        self.take(build(_traced(spec), self._device))

    def take(self, workload: Step) -> None:
        self._recorder.log.adopt(workload.tensors())
        self._start(workload)

    def _kept(self, source: Tensor) -> Callable[[], Tensor]:
        with _disable_current_modes():  # neither an op of the step nor its memory
            aside = source.clone()
        return _disable_current_modes()(aside.clone)

    def _explained(self, error: BaseException) -> AutockptError:
        return step_failed(error, f"the training step ({self._recorder.last_op})")


def _traced(spec: WorkloadSpec) -> WorkloadSpec:
    """The step that is traced, without settings that are accounted for by rules afterwards."""
    optimizer = "adamw" if spec.optimizer == "adamw8bit" else spec.optimizer
    plain = {"ddp": None, "master_weights": False, "keep_gradients": False}
    return spec.model_copy(update={**plain, "optimizer": optimizer})


def capability_at(device: torch.device) -> Capability | None:
    """The compute capability of the local GPU, if possible without opening a context; None where it is unknown."""
    if not torch.cuda.device_count():
        return None
    with suppress(RuntimeError, AssertionError):
        ask = partial(torch.cuda.get_device_capability, device)
        return without_context("cuda", ask) or ask()  # counting GPUs may have started CUDA, which no fork has then
    return None


def called_units(units: Sequence[Unit], recorder: Recorder) -> tuple[Unit, ...]:
    """Units of a recorded cycle: blocks in order of their first call, then sub-units in theirs.

    Units that were never called are dropped. Units of equal ``kind`` had equal structure before and also ran the same
    ops with the same signatures, in the same order, in every phase.
    """
    paths = recorder.location.paths
    called = {paths[number]: place for place, number in enumerate(recorder.location.order)}
    alive = [u for u in units if u.name in called and (u.parent is None or u.parent in called)]
    alive.sort(key=lambda u: (u.role != "block", called[u.parent or u.name], called[u.name]))
    inside = [_enclosing(path, alive) for path in paths]
    ran: dict[str, list[object]] = {unit.name: [] for unit in alive}
    for op in recorder.ops:
        for name in inside[op.module]:
            ran[name].append((op.phase, op.call.text))
    kinds: dict[tuple[object, ...], int] = {}
    refined = []
    for unit in alive:
        kind = kinds.setdefault((unit.kind, *ran[unit.name]), len(kinds))
        refined.append(unit.model_copy(update={"kind": kind}))
    return tuple(refined)


def unit_of(path: str, units: Sequence[Unit]) -> str | None:
    """The block that a module path lies in."""
    return max(_enclosing(path, [u for u in units if u.role == "block"]), key=len, default=None)


def _enclosing(path: str, units: Sequence[Unit]) -> list[str]:
    """Names of the units that a module path lies in."""
    return [u.name for u in units if path == u.name or path.startswith(u.name + ".")]
