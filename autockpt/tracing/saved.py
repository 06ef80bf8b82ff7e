"""Which storages autograd keeps for backward, and for which op, without changing what it keeps."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autockpt.tracing.kernels.operators import flat_tensors
from autockpt.tracing.storages import StorageLog

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


class SavedTensors:
    """Reads what each autograd node holds right after its op; a context manager around the recorded step.

    A saved-tensor hook of one's own would be seen by no op inside another hook's region and costs each saved output a
    ``detach``. So outside hook regions the node's saved attributes are read; inside them (recompute, offload) the hook
    that is in force is watched: what it keeps as it is stays saved, what it replaces by something else does not.
    """

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self.by_op: dict[int, list[int]] = defaultdict(list)
        self._regions = 0
        self._pending: list[tuple[weakref.ref[Tensor], int]] = []
        self._fields: dict[type, tuple[str, ...]] = {}

    def reset(self) -> None:
        """Start of a cycle."""
        self.by_op = defaultdict(list)
        self._pending = []

    def after(self, index: int, result: Any) -> None:
        """Op ``index`` of the forward returned ``result``; its autograd node is complete at the next ``resolve``."""
        if self._regions:
            return
        for tensor in (result,) if isinstance(result, Tensor) else flat_tensors(result):
            if tensor.is_floating_point() or tensor.is_complex():
                self._pending.append((weakref.ref(tensor), index))
                return

    def resolve(self) -> None:
        """Read the nodes of the ops since the last time, where their results are still there.

        A Python autograd function runs its ops without gradients; its node appears on one of the results at its end.
        """
        if not self._pending or not torch.is_grad_enabled():
            return
        pending, self._pending = self._pending, []
        seen: set[int] = set()
        for reference, index in reversed(pending):
            tensor = reference()
            node = None if tensor is None else tensor.grad_fn
            if node is not None and node._sequence_nr() not in seen:
                seen.add(node._sequence_nr())
                self._note(index, self._held_by(node))

    def __enter__(self) -> SavedTensors:
        self._push = _autograd._push_saved_tensors_default_hooks
        self._pop = _autograd._pop_saved_tensors_default_hooks
        _autograd._push_saved_tensors_default_hooks = self._enter_region
        _autograd._pop_saved_tensors_default_hooks = self._leave_region
        return self

    def __exit__(self, *_: object) -> None:
        _autograd._push_saved_tensors_default_hooks = self._push
        _autograd._pop_saved_tensors_default_hooks = self._pop
        self._regions = 0
        self._pending = []

    def _enter_region(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        self.resolve()
        self._regions += 1
        in_forward = torch._C._current_autograd_node() is None
        self._push(self._watched(pack) if in_forward else pack, unpack)

    def _leave_region(self) -> None:
        self._regions = max(self._regions - 1, 0)
        self._pop()

    def _watched(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def watching(tensor: Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, Tensor) and packed.layout is tensor.layout is torch.strided:
                sid = self._log.find(packed)
                if sid is not None and sid == self._log.find(tensor):
                    self.by_op[self._saving_op(tensor, sid)].append(sid)
            return packed

        return _Watching(watching, pack)

    def _saving_op(self, tensor: Tensor, sid: int) -> int:
        """Outputs are packed after their op, inputs before the op that reads them."""
        last = self._log.clock - 1
        is_output = self._log.birth[sid] == last and tensor.grad_fn is not None
        fields = dir(type(tensor.grad_fn)) if is_output else ()
        saves_it = any(name.startswith(("_saved_result", "_saved_output", "_saved_out")) for name in fields)
        return last if saves_it else last + 1

    def _held_by(self, node: Any) -> Iterator[Tensor]:
        kind = type(node)
        fields = self._fields.get(kind)
        if fields is None:
            fields = self._fields[kind] = tuple(_tensor_fields(node))
        for field in fields:
            try:
                value = getattr(node, field)
            except RuntimeError:  # freed already, or changed in place: backward will complain, not this reader
                continue
            yield from flat_tensors(value)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from (value for value in vars(node).values() if isinstance(value, Tensor))

    def _note(self, index: int, tensors: Iterator[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                sid = self._log.find(tensor)
                if sid is not None and sid not in self.by_op[index]:
                    self.by_op[index].append(sid)


class _Watching:
    """A hook in another's place, with the other's attributes: by them torch's checkpoint knows its own since 2.15."""

    def __init__(self, call: Callable[[Tensor], Any], instead_of: Callable[[Tensor], Any]) -> None:
        self._call, self._instead_of = call, instead_of

    def __call__(self, tensor: Tensor) -> Any:
        return self._call(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instead_of, name)


def _tensor_fields(node: Any) -> Iterator[str]:
    """Names of a node's attributes that can hold saved tensors."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        yield "saved_tensors"
        return
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:
            yield name
            continue
        if value is None or isinstance(value, Tensor) or flat_tensors(value):
            yield name
