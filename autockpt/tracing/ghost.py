"""The ghost run's dispatch mode: every op takes its real path through autograd, but no kernel runs on a ghost.

A ghost is a CPU tensor in reserved address space without memory behind it. Real autograd, hooks and appliers work on
it, and its storage lives exactly as long as a real one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from autockpt.checkpointing import kept_outputs
from autockpt.errors import GhostError
from autockpt.interpreter import patched
from autockpt.tracing.collectives import answer, sharded_as_ghosts
from autockpt.tracing.kernels.cuda_kernels import CUDA_ONLY, Capability, cuda_kernels, fused_dropout, fuses_dropout
from autockpt.tracing.kernels.operators import leaves
from autockpt.tracing.kernels.triton_launches import no_launches
from autockpt.tracing.memory import GhostMemory
from autockpt.tracing.recorder import OpCall, Recorder
from autockpt.tracing.shapes import DEPENDS_ON_VALUES, Outcome, Shapes, TensorLayout
from autockpt.tracing.storages import StorageLog

# Values of this many bytes are worth having for true answers (masks, positions, tables); more cost time and memory.
_REAL_BYTES = 1 << 23
# Token ids and padding masks, one value a token, decide which masks and kernels a step uses, however large the batch.
_REAL_TOKEN_BYTES, _TOKEN_DIMS = 1 << 28, 2
# The user's own floats, and those of a model that is being built, are weights and pixels, whose values decide nothing.
_REAL_FLOAT_BYTES = 1 << 18
_ONLY_POSITIONS = frozenset({"argsort", "argmax", "argmin", "multinomial"})
_MASKS = (torch.bool, torch.uint8)
_DEPENDS_ON_DATA = f"Its graph depends on data. {GhostError.default_remedy}"


class GhostMode(Recorder):
    """Records a step on ghost tensors: CPU tensors in reserved memory, with exact storages and no bytes.

    An op that reads or would make a ghost gets its result's layout from shape inference and no kernel runs; views run
    for real; ops on small real tensors run for real, so what is computed from real data only is true. Positions chosen
    from ghost values (routing) are balanced, a ghost float that is asked for is 1.0; both are noted. ``building`` is
    set while a workload is made, whose values decide nothing. Raises GhostError where the graph depends on values that
    do not exist, and keeps the last one's words in ``refused``.
    """

    def __init__(self, memory: GhostMemory) -> None:
        super().__init__(StorageLog(memory))
        self._memory = memory
        self._base, self._end = memory.base, memory.end
        self._shapes = Shapes()
        self.building = False
        self.capability: Capability | None = None  # of the NVIDIA GPU whose kernels the step is to take
        self.refused: str | None = None
        self._values_matter = True

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record what runs inside, as one cycle; ``tolist``, which reads memory by itself, refuses ghosts."""
        plain = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            if not tensor.is_floating_point() and tensor.numel() and self._memory.owns(tensor):
                raise self._refusal(
                    "the step asks for a list of values that only exist in a real step", _DEPENDS_ON_DATA
                )
            return plain(tensor)

        equal = kept_outputs.have_equal_values

        def or_ghosts(one: Tensor, other: Tensor) -> bool:
            return self._memory.owns(one) or equal(one, other)

        kernels = fused_dropout() if fuses_dropout(self.device_kind) else nullcontext()
        if self.capability is not None:
            # the result of a CUDA-only kernel is always a ghost: its values decide nothing
            kernels = cuda_kernels(self.capability, lambda: patched(self, "_values_matter", False))
        sharded = sharded_as_ghosts(self.log)
        # what is made of a mask is taken to be what it is made of
        values = patched(kept_outputs, "have_equal_values", or_ghosts)
        with patched(Tensor, "tolist", tolist), values, no_launches(), sharded, super().recording(), kernels:
            yield self

    def allocate(self, nbytes: int) -> Tensor:
        """A 1-D uint8 ghost, born before the op that runs next."""
        buffer = self._ghost(TensorLayout((nbytes,), (1,), torch.uint8, nbytes), self.log.clock)
        self.place(buffer)
        return buffer

    @staticmethod
    def over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
        """A tensor on ``storage`` with the layout of ``tensor``."""
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def stays_real(self, tensor: Tensor) -> bool:
        """Whether a tensor of the user's is small enough to keep its values."""
        number = tensor.is_floating_point() or tensor.is_complex()
        limit = _REAL_FLOAT_BYTES if number else self._real_bytes(tensor.dtype, tensor.dim())
        return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= limit

    def _run(self, call: OpCall) -> Any:
        operator, kwargs = call.kind.operator, call.kwargs
        if operator.of_ranks:  # shapes alone, of real tensors too
            found = answer(operator, call.args)
            return self._pretend(call) if found is NotImplemented else found
        device = kwargs.get("device")
        if device is not None and (kind := torch.device(device).type) != "cpu":
            if kind == "meta":
                return call.func(*call.args, **kwargs)
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs is not call.kwargs:
            call = call._replace(kwargs=kwargs)
        if operator.view or operator.layout_only or self._stays_true(call):
            return call.func(*call.args, **kwargs)
        return self._pretend(call)

    def _reads_ghost(self, tensors: list[Tensor]) -> bool:
        base, end = self._base, self._end
        for tensor in tensors:
            if (
                tensor.layout is not torch.strided
                or getattr(type(tensor), "__torch_dispatch__", None) is not _PLAIN_DISPATCH
            ):
                raise self._refusal(f"{type(tensor).__name__} tensors of layout {tensor.layout} have no ghosts", None)
            if base <= tensor.data_ptr() < end:
                return True
        return False

    def _stays_true(self, call: OpCall) -> bool:
        """Whether an op reads no ghosts, can run on a CPU, and is small enough on both sides to run for real."""
        if call.kind.operator.base in CUDA_ONLY or self._reads_ghost(call.tensors) or not self._values_matter:
            return False
        for tensor in call.tensors:
            if tensor.numel() * tensor.element_size() > self._real_bytes(tensor.dtype, tensor.dim()):
                return False
        tree = self._outcome(call).tree
        return all(leaf.nbytes <= self._real_bytes(leaf.dtype, len(leaf.size)) for leaf in leaves(tree, TensorLayout))

    def _real_bytes(self, dtype: torch.dtype, dims: int) -> int:
        number = dtype.is_floating_point or dtype.is_complex
        if not number and dims <= _TOKEN_DIMS:
            return _REAL_TOKEN_BYTES
        return _REAL_FLOAT_BYTES if self.building and number else _REAL_BYTES

    def _outcome(self, call: OpCall) -> Outcome:
        """What the call gives, inferred once per signature, or per call where values decide."""
        kind, args = call.kind, call.args
        masks = kind.operator.base == "index" and any(i is not None and i.dtype in _MASKS for i in args[1])
        if kind.outcome is None or masks or kind.operator.base in DEPENDS_ON_VALUES:
            if masks:
                args = (args[0], self._positions_of(args[1]))
            kind.outcome = self._shapes.infer(call.func, kind.operator, args, call.kwargs)
            kind.flops = kind.outcome.flops
        return kind.outcome

    def _positions_of(self, indices: Any) -> list[Tensor | None]:
        """Indices with the positions that real masks select in place of the masks; ghostly ones stay."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in _MASKS and not self._memory.owns(index):
                found.extend(index.nonzero().unbind(1))
            else:
                found.append(index)
        return found

    def _pretend(self, call: OpCall) -> Any:
        operator = call.kind.operator
        if operator.base == "_local_scalar_dense":
            return self._scalar(call.args[0])
        if operator.mutates and None not in operator.returned and operator.flops is None:
            return _written(call)
        outcome = self._outcome(call)
        if outcome.problem is not None:
            raise self._refusal(f"{operator.name} cannot be ghost-run: {outcome.problem}", _DEPENDS_ON_DATA)
        if operator.mutates and None not in operator.returned:
            return _written(call)
        if operator.base == "native_dropout":  # its mask is allocated first: allocators tell who comes when
            mask = self._result(outcome.tree[1], call)
            return self._result(outcome.tree[0], call), mask
        return self._result(outcome.tree, call)

    def _result(self, tree: Any, call: OpCall) -> Any:
        operator = call.kind.operator
        if isinstance(tree, TensorLayout):
            if operator.routing and operator.base in _ONLY_POSITIONS:
                return self._positions(tree, call)
            return self._ghost(tree, self.log.clock - 1)
        if not isinstance(tree, (list, tuple)):
            return tree
        result = []
        for i, item in enumerate(tree):
            argument = operator.returned[i] if operator.mutates else None
            if argument is not None:
                result.append(call.argument(argument))
            elif operator.routing and i == 1 and isinstance(item, TensorLayout):
                result.append(self._positions(item, call))
            else:
                result.append(self._result(item, call))
        return result if isinstance(tree, list) else tuple(result)

    def _ghost(self, layout: TensorLayout, birth: int) -> Tensor:
        storage, _ = self.log.ghost(layout.nbytes, birth)
        return torch.empty(0, dtype=layout.dtype).set_(storage, 0, layout.size, layout.stride)

    def _positions(self, layout: TensorLayout, call: OpCall) -> Tensor:
        """Positions as if each were chosen equally often: sorts keep the order, choices take turns."""
        if layout.dtype is not torch.int64 or layout.nbytes > _REAL_BYTES:
            return self._ghost(layout, self.log.clock - 1)
        self.notes.setdefault("Positions chosen from activations (expert routing, top-k) are assumed to be balanced.")
        source = call.tensors[0]
        dim = call.argument("dim", -1)
        dim = dim if isinstance(dim, int) else -1
        count = source.size(dim) if source.dim() else 1
        result = torch.empty_strided(layout.size, layout.stride, dtype=torch.int64)
        if call.kind.operator.base in ("sort", "argsort"):
            shape = [1] * source.dim()
            if shape:
                shape[dim] = count
            return result.copy_(torch.arange(count).view(shape).expand(layout.size))
        return result.copy_((torch.arange(math.prod(layout.size)) % max(count, 1)).view(layout.size))

    def _scalar(self, tensor: Tensor) -> Any:
        number = tensor.is_floating_point() or tensor.is_complex()
        if self.building:  # initialisers that draw again until all is in bounds
            return 1.0 if number else 0
        if not number:
            raise self._refusal(
                f"the step asks for the value of a {tensor.dtype} tensor that only exists in a real step",
                _DEPENDS_ON_DATA,
            )
        self.notes.setdefault("A value computed from activations was read by the step (`.item()`); 1.0 was assumed.")
        return 1.0 if tensor.is_floating_point() else 1.0 + 0.0j

    def _refusal(self, message: str, remedy: str | None) -> GhostError:
        """The error to raise; remembered, because others may catch it and raise their own."""
        self.refused = message
        return GhostError(message, remedy=remedy)


_PLAIN_DISPATCH = getattr(Tensor, "__torch_dispatch__", None)


def _written(call: OpCall) -> Any:
    """What an op that only writes to its arguments returns: those arguments."""
    values = [call.argument(name) for name in call.kind.operator.returned if name is not None]
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
