"""Steps of a job of several processes (FSDP2, tensor parallelism, DDP): every rank takes the same step together.

A sharded step cannot be taken by one rank alone, so the first rank searches, and whatever it asks of its measurer is
done on all ranks at the same time. A step takes as long as on the slowest rank, and a plan needs as much memory as on
the rank that needs most. The other ranks ``serve`` until the search is over and receive its answer.

A rank that fails in the middle of a step leaves the others waiting in a collective. Process groups cannot be repaired
(``abort`` from another thread does not free who waits in gloo), so they are given a short timeout while a search is on:
after it every rank knows the cause, the trial is on record, and the processes leave. Started again, the search goes on.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.rendezvous import rendezvous

from autockpt.devices import get_device, make_current
from autockpt.errors import AutockptError, DeviceOutOfMemory, MeasurementError, RanksError
from autockpt.interpreter import signal_handlers, signals_deferred
from autockpt.measuring.base import Choices, Measurer
from autockpt.measuring.local import LocalMeasurer
from autockpt.measuring.statistics import noise
from autockpt.process import launched, own_rank
from autockpt.schema.trial import Measurement
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build, workload_error
from autockpt.workload.factory import is_factory
from autockpt.workload.failures import summary
from autockpt.workload.sharding import in_a_group
from autockpt.workload.storages import nested_tensors

T = TypeVar("T")
MEETING = 60.0
"""Seconds within which all ranks must have called the search."""
LEAST_TIMEOUT, STEPS_OF_TIMEOUT = 60.0, 20
"""Seconds, and steps, that a collective of the training may wait while a search is on."""
FIRST_TIMEOUT = 300.0
"""The same before a step was measured."""
RECORDINGS = 3
"""Of a peak on the CPU, of which the smallest counts: gloo's threads free gathered blocks when they come to it."""
ENDING = 30.0
"""Seconds that the processes of a launcher wait for one another at their end: so long it waits before it kills."""
_AGAIN = "Start the job again: the search continues with what it has measured (torchrun --max-restarts does it itself)."
_meetings = 0


def share_of(spec: WorkloadSpec, device: str | None) -> Step:
    """This rank's share of a described step, built for real in the job that torchrun started this process for.

    Raises RanksError before anything is built where the job has not as many processes as ``spec.shard`` is over, or
    nothing is shared; on all ranks the error of one that cannot build its share.
    """
    size, there = launched(), get_device(device)
    if spec.shard is None and spec.ddp is None and not is_factory(spec.model):
        raise RanksError(
            f"rank {own_rank()} is one of {size} processes, and its job is not sharded: each would search alone",
            remedy=f"Add `shard: {size}` (or `ddp: views`) to the --job file; or search without torchrun.",
        )
    if spec.shard is not None and spec.ranks != size:
        raise RanksError(
            f"rank {own_rank()} is one of {size} processes, and `shard: {spec.shard}` is over {spec.ranks}",
            remedy=f"Start {spec.ranks} (torchrun --nproc-per-node {spec.ranks}), or shard over {size}.",
        )
    make_current(there)
    join(there.torch_device)
    step, failed = None, None
    try:
        step = build(spec, there.torch_device)
    except Exception as error:
        failed = workload_error(error, "building the model and batch")
    failures: list[AutockptError | None] = [None] * size
    distributed.all_gather_object(failures, failed)
    for rank, error in enumerate(failures):
        if error is not None:
            error.message = f"rank {rank}: {error.message}"
            raise error
    assert step is not None
    return step


def join(device: torch.device = torch.device("cpu")) -> None:
    """Let this process join the job that it was started for; its collectives are those of the device."""
    if in_a_group():
        return
    own = distributed.get_default_backend_for_device(device)
    backend = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
    try:
        store, rank, size = next(rendezvous("env://"))
        # torchrun's store lives through restarts (torch 2.13), with addresses of ranks that have died
        store = distributed.PrefixStore(f"attempt {_attempt()}", store)  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise MeasurementError(f"rank {own_rank()} does not find the others: {error}", remedy=_AGAIN) from None


def _attempt() -> str:
    """How often the launcher has started the job again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def leave_together() -> None:
    """Return on no rank before all ranks are here: a launcher that sees one end in an error ends the others at once.

    On a SIGTERM it did so already.
    """
    ended: list[int] = []
    until = time.monotonic() + ENDING
    with (
        suppress(RuntimeError, MeasurementError),
        signal_handlers({signal.SIGTERM: lambda number, frame: ended.append(number)}),
    ):
        join()
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"autockpt/left/{own_rank()}", "")
        names = [f"autockpt/left/{rank}" for rank in range(launched())]
        while not ended and not store.check(names) and time.monotonic() < until:
            time.sleep(0.02)


def sharding_of(model: nn.Module) -> str | None:
    """How a model's step takes part in collectives: "ddp", "fsdp2", "tensor-parallel", several with "+"; None: not.

    Raises RanksError for FSDP1 and DeepSpeed, whose shards cannot be followed.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Shard

    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise RanksError("FSDP1 models cannot be searched for", remedy="Shard the model with FSDP2 (fully_shard).")
    if type(model).__module__.partition(".")[0] == "deepspeed":
        raise RanksError("DeepSpeed engines cannot be searched for", remedy="Shard the model with FSDP2 (fully_shard).")
    fsdp = {id(p) for module in modules if isinstance(module, FSDPModule) for p in module.parameters()}
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    dims = max((p.device_mesh.ndim for p in sharded), default=0)
    found = {
        "ddp": any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules),
        "fsdp2": bool(fsdp),
        "tensor-parallel": any(
            id(p) not in fsdp or (dims > 1 and sum(isinstance(at, Shard) for at in p.placements) > 1) for p in sharded
        ),
    }
    return "+".join(name for name, there in found.items() if there) or None


class Ranks(Measurer):
    """What measures on all ranks of a job, for the first one; ``step`` is each rank's own, with its facts settled.

    To be made on all ranks, and to be left on all: a context manager. Raises RanksError where the ranks do not ask the
    same ``question`` of equal batches, or one of them never asks; the same error on every rank.
    """

    def __init__(self, step: Step, question: str, *, host_budget: int | None = None) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        sharding = sharding_of(step.model)
        if sharding is None:
            raise RanksError(
                f"this is one of {self.size} processes, and its model is neither sharded nor in DDP",
                remedy="Shard or wrap the model before the search; to search for one process, start it without "
                "torchrun.",
            )
        self.step = dataclasses.replace(step, settings={**step.settings, "ranks": self.size, "sharding": sharding})
        self._meet(question, sharding)
        self._control: Any = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
        # of its own: a rank that fails between two steps goes to the control group, and the others' wait must end
        self._barrier: Any = distributed.new_group(backend="gloo")
        self._local = LocalMeasurer(self.step, host_budget=host_budget, others_wait=True)
        self._local.with_others(lambda: distributed.barrier(self._barrier), RECORDINGS)
        self.environment = self._local.environment
        self._broken: MeasurementError | None = None  # why no further step can be taken
        self._timeouts = [(group, _timeout(group)) for group in (*_training_groups(step.model), self._barrier)]
        self._wait_at_most(FIRST_TIMEOUT)

    def measure(self, choices: Choices, *, steps: int = 5, budget_bytes: int | None = None) -> Measurement:
        """See ``Measurer.measure``: the slowest rank's times, the largest peak."""
        # no limit: a rank that runs into it alone, in the middle of a step, leaves the others waiting
        found: list[Measurement] = self._on_all("measure", choices=dict(choices), steps=steps)
        times = tuple(map(max, zip(*(one.times for one in found), strict=True)))
        return found[0].model_copy(
            update={
                "peak_bytes": max(one.peak_bytes for one in found),
                "host_bytes": max(one.host_bytes for one in found),
                "step_seconds": statistics.median(times),
                "noise": noise(times),
                "times": times,
                "loss_is_finite": all(one.loss_is_finite for one in found),
                "peak_by_rank": tuple(one.peak_bytes for one in found),
                "seconds_by_rank": tuple(one.step_seconds for one in found),
            }
        )

    def compare(self, plans: Mapping[str, Choices], *, rounds: int = 5) -> dict[str, list[float]]:
        """See ``Measurer.compare``: in every round the slowest rank's time."""
        asked = {name: dict(choices) for name, choices in plans.items()}
        found = self._on_all("compare", plans=asked, rounds=rounds)
        return {name: list(map(max, zip(*(one[name] for one in found), strict=True))) for name in plans}

    def call(self, ref: str, payload: dict[str, Any]) -> Any:
        """See ``Measurer``; without a time limit (``within``), by which each rank's clock would end another cycle."""
        return super().call(ref, {name: value for name, value in payload.items() if name != "within"})

    def _ask(self, verb: str, **arguments: Any) -> Any:
        """Done on all ranks, answered by the first."""
        return self._on_all(verb, **arguments)[0]

    def conduct(self, search: Callable[[], T]) -> T:
        """Run the search on the first rank and give its answer, or its error, to all others."""
        answer: dict[str, Any] = {"error": MeasurementError("the search was interrupted on rank 0")}
        try:
            found = search()
            answer = {"answer": found}
            return found
        except AutockptError as error:
            answer = {"error": error}
            raise
        finally:
            with suppress(MeasurementError):  # a rank that has left takes no answer
                self._broadcast(("end", answer))

    def serve(self) -> Any:
        """Take steps as the first rank asks for them, until its search is over; its answer. Raises its error."""
        # whether to go on is the first rank's to say; when it is gone its connections are closed
        with signal_handlers({signal.SIGINT: signal.SIG_IGN}), signals_deferred([signal.SIGTERM]):
            while True:
                verb, asked = self._broadcast(None)
                if verb == "end":
                    if "error" in asked:
                        raise asked["error"]
                    return asked["answer"]
                self._take_part(verb, asked)

    def close(self) -> None:
        """Give back the step's state; its groups have the timeouts of before, and those of the search are gone."""
        self._local.close()
        for group, before in self._timeouts:
            _set_timeout(group, before)
        if self._timeouts and self._broken is None:  # else a rank may still wait in one of them
            for group in (self._control, self._barrier):
                distributed.destroy_process_group(group)
        self._timeouts = []

    def _meet(self, question: str, sharding: str) -> None:
        """Wait until all ranks ask, and refuse on all of them what they do not ask alike."""
        global _meetings
        _meetings += 1  # the same on all ranks, which call in the same order
        store = distributed.distributed_c10d._get_default_store()
        shapes = [list(tensor.shape) for tensor in nested_tensors(self.step.batch)]
        facts = {"question": question, "sharding": sharding, "batch": str(shapes), "device": self.step.device.type}
        names = [f"autockpt/{_attempt()}/{_meetings}/{rank}" for rank in range(self.size)]
        store.set(names[self.rank], "\0".join(facts.values()))
        try:
            store.wait(names, timedelta(seconds=MEETING))
        except RuntimeError:
            missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            raise RanksError(
                f"rank {', '.join(missing)} did not ask for a plan within {MEETING:g} s",
                remedy="Call autockpt.search on all ranks: a sharded step is taken by all of them together.",
            ) from None
        first = dict(zip(facts, store.get(names[0]).decode().split("\0"), strict=True))
        for rank, name in enumerate(names):
            own = dict(zip(facts, store.get(name).decode().split("\0"), strict=True))
            if unlike := [what for what in facts if own[what] != first[what]]:
                what = unlike[0]
                raise RanksError(
                    f"rank {rank} has another {what} than rank 0: {own[what]} and {first[what]}",
                    remedy="Give all ranks the same arguments, and batches of the same shapes.",
                )

    def _broadcast(self, message: Any) -> Any:
        """The first rank's message, on all."""
        sent = [message]
        with self._all_there():
            distributed.broadcast_object_list(sent, src=0, group=self._control)
        return sent[0]

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        """Raises MeasurementError where a rank has left, by which its connections are closed."""
        try:
            yield
        except RuntimeError as error:
            self._broken = MeasurementError(f"a rank has left during the search: {error}", remedy=_AGAIN)
            raise self._broken from None

    def _on_all(self, verb: str, **asked: Any) -> list[Any]:
        """Results by rank of what is done on all ranks. Raises the error of the rank that failed first."""
        if self._broken is not None:
            raise self._broken
        with signals_deferred((signal.SIGINT, signal.SIGTERM)):  # all ranks end what they have begun
            self._broadcast((verb, asked))
            everyone = self._take_part(verb, asked)
        failed = [(answer["at"], rank, answer["error"]) for rank, answer in enumerate(everyone) if "error" in answer]
        if not failed:
            return [answer["result"] for answer in everyone]
        _, rank, error = min(failed, key=lambda one: one[:2])
        error.message = f"rank {rank}: {error.message}"
        if len(failed) < self.size or any(type(one[2]) is not type(error) for one in failed):
            # the others were left waiting in a collective
            self._broken = MeasurementError(f"no step can be taken any more: {error.message}", remedy=_AGAIN)
            if isinstance(error, DeviceOutOfMemory):
                error.last = self._broken
        raise error

    def _take_part(self, verb: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Do this rank's share; what all of them have to say of theirs."""
        self._local.beat = self.beat
        try:
            mine: dict[str, Any] = {"result": getattr(self._local, verb)(**asked)}
        except Exception as error:
            ours = isinstance(error, AutockptError)
            known = error if ours else MeasurementError(f"the step failed: {summary(error)}", remedy=_AGAIN)
            mine = {"error": known, "at": time.time()}
        everyone: list[Any] = [None] * self.size
        with self._all_there():
            distributed.all_gather_object(everyone, mine, group=self._control)
        if verb == "measure" and all("result" in answer for answer in everyone):  # what all ranks know by now
            slowest = max(answer["result"].step_seconds for answer in everyone)
            self._wait_at_most(max(LEAST_TIMEOUT, STEPS_OF_TIMEOUT * slowest))
        return everyone

    def _wait_at_most(self, seconds: float) -> None:
        """Let no rank wait longer than this for another one in a collective of the step."""
        for group, _ in self._timeouts:
            _set_timeout(group, timedelta(seconds=seconds))


def _training_groups(model: nn.Module) -> list[Any]:
    """The process groups that a model's step uses, as far as its parts name them; the job's own one always."""
    from torch.distributed.tensor import DTensor

    groups: dict[int, Any] = {id(distributed.group.WORLD): distributed.group.WORLD}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            groups.update((id(group), group) for group in parameter.device_mesh.get_all_groups())
    if isinstance(model, nn.parallel.DistributedDataParallel):
        groups[id(model.process_group)] = model.process_group
    return list(groups.values())


def _timeout(group: Any) -> timedelta:
    """Of a group's operations."""
    # private: torch has no public way to ask for a timeout, nor to change one of a group that exists
    return group._get_backend(_device_of(group)).options._timeout


def _set_timeout(group: Any, timeout: timedelta) -> None:
    group._get_backend(_device_of(group))._set_default_timeout(timeout)


def _device_of(group: Any) -> torch.device:
    return torch.device(next((device.type for device in group._device_types if device.type != "cpu"), "cpu"))
