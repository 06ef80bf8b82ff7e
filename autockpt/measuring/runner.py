"""Run and time real steps of a workload on a device, with choices attached.

All plans are measured under equal conditions: the same random state, weights that do not change, no garbage collection.
"""

from __future__ import annotations

import gc
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from autockpt.devices import Device, Peak, random_states
from autockpt.devices.streams import pinned_memory_kept
from autockpt.errors import MeasurementError
from autockpt.interpreter import collection_paused, has_frozen_objects
from autockpt.measuring.base import TIMED_CYCLE, Choices
from autockpt.measuring.compiler import SETTLING, Compiler
from autockpt.measuring.failures import releasing_memory
from autockpt.measuring.snapshot import structure_of
from autockpt.measuring.statistics import noise
from autockpt.policies.offload import MOVING
from autockpt.runtime import Session, attach, without_kv_cache
from autockpt.schema.choices import SAVE
from autockpt.schema.plan import plan_hash
from autockpt.schema.trial import Measurement
from autockpt.verification import Observation, observe
from autockpt.workload import Step
from autockpt.workload.step import ignore


@dataclass(eq=False, repr=False)
class StepRunner:
    """Runs whole cycles of a workload under equal conditions and measures them.

    Every cycle starts from the same random state and runs with learning rates of zero, so that all plans do identical
    work; ``full_step`` workloads are seeded only. No gradients are alive between cycles. After any error the workload
    can be used again: no choices attached, no gradients, optimizer states as they were. On devices whose allocator
    keeps what was freed every plan makes the optimizer's states again in its first cycle, as training does: they come
    to lie among the activations of that cycle, and what the allocator needs from then on depends on where. ``beat`` is
    called with a word whenever a cycle has ended: a sign of life. Plans claim no more than ``host_budget`` bytes on the
    host, or their step raises HostBudgetExceeded. ``barrier`` is called before every cycle, untimed; a peak is the
    least of so many ``recordings``. With ``compiler`` all plans are measured in compiled steps; compiling is not timed.
    """

    workload: Step
    device: Device
    _: KW_ONLY
    beat: Callable[[str], None] = ignore
    host_budget: int | None = None
    compiler: Compiler | None = None
    barrier: Callable[[], object] | None = None
    recordings: int = 1

    def __post_init__(self) -> None:
        self._seed = self.workload.spec.seed if self.workload.spec is not None else 0
        self._freezer = Freezer()
        optimizer = self.workload.optimizer
        self._states = [] if optimizer is None else [*structure_of(optimizer.state)]
        self._sessions: dict[str, Session] = {}  # by plan, removed until it is reattached
        self._round = 0  # over all comparisons, so that many short ones balance out as well
        self._steady = False  # whether a cycle has run to its end, so that all optimizer states exist
        self._loss_is_finite = True  # of the first cycle: all others do the same work

    def measure(self, choices: Choices, *, steps: int = 5, budget_bytes: int | None = None) -> Measurement:
        """Peak and time of one plan: a cycle that warms up, ``steps`` timed ones, and one untimed for the peak.

        Where the first cycle shows the peak already, it is the one that warms up. A cycle more comes first where there
        are no optimizer states yet. ``noise`` in the result is half the 95 % interval of the median as a share of it.
        See ``Measurer.measure`` for the errors.
        """
        # whether a plan's first cycle has the peak of all: nothing compiled, no allocator that keeps what it freed
        at_once = self.compiler is None and self.workload.full_step is None and not self.device.keeps_memory
        with self.device.limit(budget_bytes), self.attached(choices) as session:
            peak = self._smallest_peak() if at_once else None
            compiled = self._warm_up(int(not at_once))
            times = [self.time_cycle() for _ in range(steps)]
            peak = peak or self._smallest_peak()
            graphs = 0
            if self.compiler is not None:
                graphs = self.compiler.graphs(self.workload.model, choices)
        return Measurement(
            peak_bytes=peak.peak_bytes,
            step_seconds=statistics.median(times),
            noise=noise(times),
            steps=steps,
            host_bytes=session.host_bytes,
            allocated_bytes=peak.allocated_bytes,
            times=tuple(times),
            compile_seconds=round(compiled, 3),
            graphs=graphs,
            loss_is_finite=self._loss_is_finite,
        )

    def compare(self, plans: Mapping[str, Choices], *, rounds: int = 5) -> dict[str, list[float]]:
        """Seconds per cycle of every plan in each round. Plans are interleaved; orders rotate, every second mirrored.

        Attaching and removing is not timed, nor is a cycle that warms up where the plan needs one.
        Raises DeviceOutOfMemory with the name of the plan that does not fit.
        """
        times: dict[str, list[float]] = {name: [] for name in plans}
        # a bound on the host is for one plan's memory, not for what another's left behind
        kept = pinned_memory_kept() if self.host_budget is None else nullcontext()
        with kept:
            for _ in range(rounds):
                for name in turn_order(list(plans), self._round):
                    untimed = self._untimed_cycles(plans[name])
                    with self.attached(plans[name], what=f"plan {name!r}"):
                        self._warm_up(untimed)
                        times[name].append(self.time_cycle())
                self._round += 1
        return times

    def call(self, ref: str, payload: dict[str, Any]) -> Any:
        """Run ``package.module:function`` as ``function(runner, payload)``."""
        module, _, name = ref.partition(":")
        return getattr(importlib.import_module(module), name)(self, payload)

    @contextmanager
    def attached(self, plan: Choices, *, what: str = "this plan") -> Iterator[Session]:
        """Choices attached to the model while the block runs. See ``prepared`` for what holds afterwards."""
        with self.prepared(what) as stack:
            session = stack.enter_context(self.session(plan))
            stack.enter_context(self.compiling(plan))
            yield session

    @contextmanager
    def session(self, choices: Choices | None) -> Iterator[Session]:
        """Choices attached while the block runs; None: only what a plan does besides its choices.

        The next time by the same objects, which know the plan's layers by then, and which compiled code belongs to.
        """
        key = "plain" if choices is None else plan_hash(choices)
        if (session := self._sessions.pop(key, None)) is None:
            model, bound = self.workload.model, self.host_budget
            session = without_kv_cache(model) if choices is None else attach(model, choices, host_budget=bound)
            session.sentinels.in_mid_training = True
            session.remove()
        with session.reattach():
            yield session
        if not any(choice.kind in MOVING for choice in (choices or {}).values()):  # the host has room for one at a time
            self._sessions[key] = session

    def compiling(self, choices: Choices) -> AbstractContextManager[None]:
        """The model's calls are compiled while the block runs, where this runner has a compiler."""
        compiler = self.compiler
        return nullcontext() if compiler is None else compiler.compiling(self.workload.model, choices)

    def _untimed_cycles(self, plan: Choices) -> int:
        """Cycles in which a plan takes longer than later on, once it is attached.

        In its first one a plan's units learn and check what they do. An allocator that keeps memory begins with none.
        """
        learns = plan_hash(plan) not in self._sessions and any(choice != SAVE for choice in plan.values())
        return int(learns or self.device.keeps_memory or self.compiler is not None)

    def _warm_up(self, cycles: int) -> float:
        """Run cycles until one needed nothing to be compiled; seconds that compiling took.

        Raises MeasurementError where a compiler finds something to do in every one.
        """
        compiler = self.compiler
        times, before = (compiler.times, compiler.seconds) if compiler is not None else (0, 0.0)
        for _ in range(cycles + (not self._steady)):
            self.run_cycle()
        for _ in range(SETTLING):
            if compiler is None or compiler.times == times:
                return compiler.seconds - before if compiler is not None else 0.0
            times = compiler.times
            self.run_cycle()
        raise MeasurementError(
            f"the step is still being compiled again after {SETTLING} cycles",
            remedy="Run it with TORCH_LOGS=recompiles to see why, or search without --compile.",
        )

    @contextmanager
    def prepared(self, what: str) -> Iterator[ExitStack]:
        """Set up equal conditions for a plan that is attached next; the yielded stack removes it.

        Whatever happens inside, that, gradients and half-made optimizer states are gone afterwards; running out of
        memory arrives as DeviceOutOfMemory, with everything that the step held let go.
        """
        if self.device.keeps_memory:
            self._steady = False
            self._restore_states()
        self.device.release()
        self._freezer.freeze()
        with ExitStack() as stack:
            stack.enter_context(releasing_memory(self.device, what))
            stack.callback(self._clean_up)
            if self.workload.full_step is None:
                stack.enter_context(weights_frozen(self.workload.optimizer))
            yield stack

    def close(self) -> None:
        """Unfreeze all objects for the garbage collector."""
        self._freezer.thaw()

    def seed(self) -> None:
        """Set all random generators to the state in which every cycle starts."""
        if self.barrier is not None:
            self.barrier()
        seed_all(self._seed, self.device.torch_device)

    def observed(self, *, sketched: bool, typed: bool = True) -> Observation:
        """Two accumulating steps from where every cycle starts; ``sketched`` and ``typed`` as for ``observe``."""

        def forward_backward(between: Callable[[], None]) -> Tensor:
            return self.workload.forward_backward(lambda phase: between() if phase == "backward" else None)

        self.seed()
        return observe(self.workload.model, forward_backward, sketched=sketched, typed=typed)

    def run_cycle(self, mark: Callable[[Any], None] | None = None) -> None:
        """One cycle from the same random state as every other. Not timed; ``mark`` as in ``Step.cycle``."""
        self.seed()
        self.workload.cycle(mark, None if self._steady else self._check_loss)
        self._steady = True
        self.beat("cycle")

    def _check_loss(self, loss: Tensor) -> None:
        """Note whether a loss of the first cycle is finite."""
        self._loss_is_finite = self._loss_is_finite and bool(loss.isfinite().all())

    def time_cycle(self) -> float:
        """Seconds of one cycle, synchronised, without garbage collection or seeding inside."""
        self.seed()
        with collection_deferred():
            seconds = self.device.time(self.workload.cycle)
        self.beat(TIMED_CYCLE)
        return seconds

    def _smallest_peak(self) -> Peak:
        return min((self.measure_peak() for _ in range(self.recordings)), key=lambda peak: peak.peak_bytes)

    def measure_peak(self) -> Peak:
        """Peak of one untimed cycle from the second on; needs a cycle to have run before.

        A ``full_step`` decides itself when gradients are released. There they are dropped first and two cycles
        recorded: the second then begins as it would in training, and everything it releases is known.
        """
        if not self._steady:
            self.run_cycle()
        self.seed()
        cycles = 1
        if self.workload.full_step is not None:
            self.workload.release_gradients()
            cycles = 2
        with collection_deferred():
            peak = self.device.measure_peak(lambda: self._cycles(cycles), self.workload.resident_bytes())
        self.beat("peak")
        return peak

    def _cycles(self, count: int) -> None:
        for _ in range(count):
            self.workload.cycle()

    def _restore_states(self) -> None:
        """Restore the optimizer's states of when this was made."""
        for undo in reversed(self._states):
            undo()

    def _clean_up(self) -> None:
        """Leave the workload as between two cycles, wherever the last one was aborted."""
        if not self._steady:
            self._restore_states()
        # an aborted cycle may have unscaled its gradients already
        getattr(self.workload.scaler, "_per_optimizer_states", {}).clear()
        self.workload.release_gradients()


def turn_order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: rotated every second round and mirrored in between, so that drift hits all alike."""
    shift = number // 2 % max(len(names), 1)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


# --- equal conditions for every measured cycle


def seed_all(seed: int, device: torch.device) -> None:
    """Seed every generator a step may draw from: Python's, NumPy's where loaded, PyTorch's on CPU and device."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    random_states.seed(device, seed)


@contextmanager
def weights_frozen(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Set learning rates to zero: the optimizer does all its work, but weights do not change.

    So every cycle sees the same numbers, however many ran before it (experts are routed alike, nothing turns into
    denormals or NaN). Learning rates kept in tensors are left alone.
    """
    groups = [] if optimizer is None else [g for g in optimizer.param_groups if isinstance(g.get("lr"), (int, float))]
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate


class Freezer:
    """Freezes long-lived objects (``gc.freeze``), so that collections visit only newer ones.

    With transformers and an optimizer loaded a full collection takes 0.2 s, and one precedes every timed cycle. Does
    nothing where other code froze objects before, as unfreezing cannot tell them apart.
    """

    def __init__(self) -> None:
        self._ours = not has_frozen_objects()

    def freeze(self) -> None:
        """Freeze all objects that are alive. To be called after a collection, or garbage would be frozen as well."""
        if self._ours:
            gc.freeze()

    def thaw(self) -> None:
        """Unfreeze all objects."""
        if self._ours:
            gc.unfreeze()


@contextmanager
def collection_deferred() -> Iterator[None]:
    """Collect garbage now and not within the block, as a timed cycle would be slower."""
    gc.collect()
    with collection_paused():
        yield
