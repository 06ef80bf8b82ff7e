"""The dispatch mode that records a training step: every op with its place, its storages and its work.

``GhostMode`` (ghost.py) records without running kernels, ``RealRecorder`` here records a real step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from autockpt.devices.base import OffloadHandle
from autockpt.interpreter import patched
from autockpt.policies.compiling import uncompiled
from autockpt.schema.graph import Copy, TensorMeta, Tier, Work
from autockpt.tracing.accumulation import Counts, InPlaceAdds
from autockpt.tracing.kernels.operators import Operator, Operators, count_flops, flat_tensors
from autockpt.tracing.kernels.quantised_kernels import notes_on_quantised
from autockpt.tracing.kernels.signature import dtype_name, signature
from autockpt.tracing.kernels.triton_launches import LAUNCH, NOTE
from autockpt.tracing.kernels.work import work_of
from autockpt.tracing.kernels.workspaces import ESTIMATED, MOST_FLOPS, MOST_FLOPS_TOGETHER, trial_of, workspace_bytes
from autockpt.tracing.location import BACKWARD, Location
from autockpt.tracing.shapes import Outcome
from autockpt.tracing.storages import StorageLog
from autockpt.workload.storages import nested_tensors

_SCALARS = frozenset({int, bool, str, type(None)})
_SETTINGS = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format, complex})
_PLAIN = frozenset({Tensor, nn.Parameter})


def call_key(args: Any, tensors: list[Tensor], mutates: bool) -> tuple[Any, ...]:
    """What a call's signature and outcome depend on. Appends the call's tensors to ``tensors``."""
    key = []
    for value in args:
        kind = value.__class__
        if kind in _PLAIN or isinstance(value, Tensor):
            tensors.append(value)
            strided = value.layout is torch.strided
            key.append((value.size(), value.stride() if strided else (), value.dtype))
        elif kind in _SCALARS:
            key.append((kind, value))
        elif kind is float:
            # In-place ops take learning rates and the like, which change from step to step and decide nothing here.
            key.append(kind if mutates else (kind, value))
        elif isinstance(value, (list, tuple)):
            key.append(call_key(value, tensors, mutates))
        else:
            # Storages and generators by kind only: a key that held one would keep its memory alive.
            key.append((kind, value) if kind in _SETTINGS else kind)
    return tuple(key)


@functools.cache
def _takes_apart(kind: type) -> bool:
    """Whether a type is torchao's or DTensor, which wraps other tensors and has no memory of its own."""
    ours = kind.__module__.partition(".")[0] == "torchao" or kind.__module__.startswith("torch.distributed.tensor")
    return ours and hasattr(kind, "__tensor_flatten__")


_current_node = torch._C._current_autograd_node


class OpRecord(NamedTuple):
    """One recorded op; ``call`` says what it was, numbers refer to the location's and the storage log's lists."""

    call: KindOfCall
    phase: int
    module: int
    inputs: tuple[int, ...]
    outputs: tuple[TensorMeta, ...]


class KindOfCall:
    """Everything that all calls of one signature share. ``outcome`` is inferred, ``work`` known, after the first."""

    __slots__ = ("flops", "operator", "outcome", "text", "trial", "work", "workspace")

    def __init__(self, operator: Operator, text: str) -> None:
        self.operator = operator
        self.text = text
        self.flops = 0
        self.workspace = 0
        self.trial: Callable[[], int] | None = None  # where the workspace is only an estimate
        self.outcome: Outcome | None = None
        self.work: Work | None = None


class OpCall(NamedTuple):
    """A call of an op that is about to run. ``tensors`` are those among its arguments, in order."""

    kind: KindOfCall
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]

    def argument(self, name: str, default: Any = None) -> Any:
        """The value of a named argument."""
        return self.kind.operator.argument(name, self.args, self.kwargs, default)


class Recorder(TorchDispatchMode):
    """Records every op below autograd with its place and storages; subclasses run (or skip) the kernel.

    It holds no tensor, autograd node or exception between two ops, as that would keep memory alive which a plain step
    releases. What is known of signatures is kept, so that later recordings are faster.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped by torch: the wrapper costs as much as recording does, and importing dynamo a second."""
        return False

    device_kind = "cpu"  # of the device that the step runs on, or would
    threads = 1  # of a step on the CPU
    ops: list[OpRecord]  # in order
    copies: list[tuple[int, Copy]]  # with the modules that they belong to
    gradients: set[int]  # storages of parameters' gradients
    placed: dict[int, int]  # storage -> module, for storages that no op made

    def __init__(self, log: StorageLog, adds: InPlaceAdds | None = None) -> None:
        super().__init__()
        self.log = log
        self.location = Location()
        self.operators = Operators()
        self._adds = adds or InPlaceAdds(_sole_counts())
        self.notes: dict[str, None] = {}
        self._untried: list[KindOfCall] = []
        self._tried = 0.0  # FLOPs
        self._layouts: dict[Any, tuple[tuple[int, ...], tuple[int, ...], str]] = {}
        self.restart()

    @property
    def last_op(self) -> str:
        """The last op that ran, for error messages."""
        if not self.ops:
            return "before its first op"
        op = self.ops[-1]
        return f"after {op.call.operator.name} in {self.location.paths[op.module] or 'the model'}"

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what runs inside, as one cycle; what is alive now is resident."""
        self.restart()
        with self.location, self._random_states(), uncompiled(), self:
            yield self

    def restart(self) -> None:
        """Drop the last recording."""
        self.log.restart()
        self.location.reset()
        self._product: int | None = None  # the storage of the last matrix product
        self.ops, self.copies, self.begins = [], [], []
        self.gradients, self.placed, self.notes = set(), {}, {}

    def _random_states(self) -> AbstractContextManager[None]:
        """Watch the CPU generator's saved states (5 kB each), which recompute keeps and no op makes."""
        plain = torch.get_rng_state

        def watched() -> Tensor:
            state = plain()
            if self.device_kind == "cpu":
                self.place(state)
            return state

        return patched(torch, "get_rng_state", watched)

    def try_kernels(self) -> None:
        """Run convolutions once per signature to learn their workspaces, and add notes on recorded kernels."""
        for kind in self._untried:
            if kind.trial and kind.flops <= MOST_FLOPS and self._tried + kind.flops <= MOST_FLOPS_TOGETHER:
                self._tried += kind.flops
                kind.workspace, kind.trial = kind.trial(), None
        self._untried.clear()
        if any(op.call.trial is not None for op in self.ops):
            self.notes.setdefault(ESTIMATED)
        names = {op.call.operator.name for op in self.ops}
        if f"autockpt.{LAUNCH}.default" in names:
            self.notes.setdefault(NOTE)
        if self.device_kind == "cuda":
            self.notes.update(dict.fromkeys(notes_on_quantised(names)))

    # For transports of offloaded tensors.

    def place(self, tensor: Tensor) -> None:
        """Watch a tensor that no op has made: born before the op that runs next, if it has not been seen before."""
        self.placed.setdefault(self.log.watch(tensor.untyped_storage(), self.log.clock), self.location.module)

    def hold(self, gradients: Iterable[Tensor | None]) -> None:
        """Note the gradients of sharded parameters, which the optimizer finds and autograd has not set: FSDP2 has."""
        found = map(self.log.find, nested_tensors(*filter(is_traceable_wrapper_subclass, gradients)))
        self.gradients.update(number for number in found if number is not None)

    def copy_issued(self, direction: Literal["out", "in"], nbytes: int, module: int, tier: Tier) -> Copy:
        """Note that a copy starts now."""
        copy = Copy(direction, nbytes, self.log.clock, tier=tier)
        self.copies.append((module, copy))
        return copy

    # The mode itself.

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if types and any(map(_takes_apart, types)):
            return NotImplemented  # its type does it by ops on the tensors inside, which come here in turn
        kwargs = kwargs or {}
        operator = self.operators[func]
        if operator.namespace == "profiler":  # a name for what runs next (FSDP2 gives one to every call): no op
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        key = call_key(args, tensors, operator.mutates)
        if kwargs:
            key = (key, tuple(kwargs), call_key(kwargs.values(), tensors, operator.mutates))
        phase, module = self.location.where(_current_node())
        in_place = operator.in_place is not None and self._is_in_place(phase, operator, args, kwargs)
        if in_place:
            func = operator.in_place
            operator = self.operators[func]
        kind = self._kind(operator, func, key, args, kwargs)
        call = OpCall(kind, func, args, kwargs, tensors)
        index = self.log.clock
        self.log.clock = index + 1
        inputs = self._inputs(operator, tensors, index)
        result = self._run(call)
        if in_place:  # for a caller that expects a new tensor object
            result = args[0].detach()
        outputs = self._outputs(result, index)
        if kind.work is None:
            made = [tensor for tensor in flat_tensors(result) if self._counts(tensor)]
            kind.work = work_of(operator, kind.text, operator.arguments(args, kwargs), tensors, made, kind.flops)
        self.ops.append(OpRecord(kind, phase, module, inputs, outputs))
        if operator.multiplies and outputs:
            self._product = outputs[0].storage
        if self.location.accumulating:
            self.gradients.update(inputs)
        return result

    def _run(self, call: OpCall) -> Any:
        """The op's result."""
        raise NotImplementedError

    def _is_in_place(self, phase: int, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a plain step would run this op in the memory of its first argument."""
        storage = self.log.find(args[0]) if isinstance(args[0], Tensor) else None
        if not operator.adds:  # the gradient of a selection, scattered into zeros that were made for it
            return phase == BACKWARD and storage is not None and self.log.birth[storage] == self.log.clock - 1
        if phase == BACKWARD:
            return self._adds.of_engine(args, kwargs)
        return storage is not None and storage == self._product and self._adds.to_product(args, kwargs)

    def _kind(
        self, operator: Operator, func: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KindOfCall:
        kind = operator.calls.get(key)
        if kind is None:
            kind = operator.calls[key] = KindOfCall(operator, signature(func, args, kwargs))
            kind.workspace = workspace_bytes(operator, args, kwargs, self.device_kind, self.threads)
            if self.device_kind == "cpu" and (trial := trial_of(operator, func, args)) is not None:
                kind.trial = trial
                self._untried.append(kind)
        return kind

    def _inputs(self, operator: Operator, tensors: list[Tensor], index: int) -> tuple[int, ...]:
        # `torch.tensor` makes its storage out of the dispatcher's sight; anything else unseen was there before.
        birth = index if operator.base == "lift_fresh" else -1
        storages = (tensor.untyped_storage() for tensor in tensors if self._counts(tensor))
        return tuple([self.log.watch(storage, birth) for storage in storages])

    def _outputs(self, result: Any, index: int) -> tuple[TensorMeta, ...]:
        tensors = (result,) if isinstance(result, Tensor) else flat_tensors(result)
        records = []
        for tensor in tensors:
            if self._counts(tensor):
                sid = self.log.watch(tensor.untyped_storage(), index)
                records.append(TensorMeta(*self._layout(tensor), sid))
        return tuple(records)

    def _counts(self, tensor: Tensor) -> bool:
        """Whether a tensor occupies memory that is recorded."""
        return tensor.layout is torch.strided and not tensor.is_meta

    def _layout(self, tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        key = tensor.size(), tensor.stride(), tensor.dtype
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = tuple(key[0]), tuple(key[1]), dtype_name(key[2])
        return layout


class RealRecorder(Recorder):
    """Records a step whose kernels run, on any device; counts the tensors on ``device`` only."""

    def __init__(self, device: torch.device, adds: InPlaceAdds | None = None) -> None:
        super().__init__(StorageLog(), adds)
        self.device_kind = device.type
        self.threads = torch.get_num_threads()

    def _run(self, call: OpCall) -> Any:
        result = call.func(*call.args, **call.kwargs)
        kind = call.kind
        if kind.operator.flops is not None and not kind.flops:
            kind.flops = count_flops(kind.operator, call.args, call.kwargs, result)
        return result

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device.type == self.device_kind


@functools.cache
def _sole_counts() -> Counts:
    """Counts of a gradient that only the engine holds, seen once through a recorder: they are Python's and torch's."""
    adds = InPlaceAdds()
    with RealRecorder(torch.device("cpu"), adds).recording(), torch.enable_grad():
        node = torch.ones(2, requires_grad=True) * 1.0
        (node.sin() + node.cos()).sum().backward()
    assert adds.sole is not None
    return adds.sole


class RecordingTransport:
    """A Transport that records every copy with its place in the step, and moves no bytes.

    ``keep`` is called with a storage that is offloaded, and returns what makes a new device buffer with the same bytes.
    ``copy_queues`` are those of the real or simulated device.
    """

    def __init__(
        self, keep: Callable[[Tensor], Callable[[], Tensor]], copy_queues: bool, recorder: Recorder, tier: Tier = "cpu"
    ) -> None:
        self.keep, self.copy_queues, self.recorder = keep, copy_queues, recorder
        self.tier: Tier = tier

    def send(self, source: Tensor) -> RecordingHandle:
        return RecordingHandle(self, source)


class RecordingHandle(OffloadHandle):
    """A storage that counts as offloaded. The op that runs next waits for a copy; each copy back is recorded."""

    _in: Copy

    def __init__(self, transport: RecordingTransport, source: Tensor) -> None:
        super().__init__(source)
        self._recorder = transport.recorder
        self._module = self._recorder.location.module  # what comes back belongs where it was
        self._out = self._recorder.copy_issued("out", self.nbytes, self._module, transport.tier)
        self._made_again = transport.keep(source)

    def _wait_until_left(self) -> None:
        self._out.awaited = self._recorder.log.clock

    def _bring_back(self) -> Tensor:
        self._in = self._recorder.copy_issued("in", self.nbytes, self._module, self._out.tier)
        return self._made_again()

    def _wait_until_back(self, back: Tensor) -> None:
        if self._in.awaited is None:
            self._in.awaited = self._recorder.log.clock
        self._recorder.place(back)

    def __del__(self) -> None:
        self._out.released = self._recorder.log.clock
