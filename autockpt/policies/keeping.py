"""Outputs that one forward of a unit keeps, and hands out when that forward runs again.

Works below autograd: the second forward builds its graph as usual, only the kernels of kept ops are not executed. The
dispatch mode that does this costs host time for every op it sees, so it is entered around the modules in question only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from autockpt.errors import ConflictError
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import InPlaceError
from autockpt.policies.heavy import draws_random_numbers, is_attention, is_heavy
from autockpt.policies.replay import Replay, ReplayState

_current = threading.local()


class _Output:
    """What one op returned. Its tensors are aliases without a graph, which share their version counters."""

    def __init__(self, func: Any, out: Any) -> None:
        leaves, self._form = tree_flatten(out)
        self.func = func
        self._leaves = [_alias(leaf) for leaf in leaves]
        self._versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in self._leaves]

    def changed(self) -> torch.Tensor | None:
        """A tensor that was changed in place since."""
        pairs = zip(self._leaves, self._versions, strict=True)
        return next((t for t, version in pairs if isinstance(t, torch.Tensor) and t._version != version), None)

    def again(self) -> Any:
        return tree_unflatten([_alias(leaf) for leaf in self._leaves], self._form)


def _alias(leaf: Any) -> Any:
    """The same memory under a tensor of its own, without a graph, that shares the version counter.

    Below autograd views do not share it by themselves, and a change in place would go unnoticed.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


class Frame:
    """Kept outputs of one call of a unit, by the order in which its scopes are entered and their ops run."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.recording = True
        self._outputs: dict[tuple[int, int], _Output] = {}
        self._scopes = 0
        self._inside = False

    def begin(self, *, recording: bool) -> None:
        """The unit's forward begins, for the first time or again."""
        self.recording, self._scopes, self._inside = recording, 0, False

    def scope(self, wanted: Callable[[Any], bool]) -> TorchDispatchMode:
        """A mode that keeps the outputs of wanted ops, or hands them out."""
        self._scopes += 1
        return _Scope(self, self._scopes, wanted)

    @property
    def inside(self) -> bool:
        """Whether a scope is open: it sees all that runs within it, so another inside would count ops twice."""
        return self._inside

    def keep(self, place: tuple[int, int], func: Any, out: Any) -> None:
        self._outputs[place] = _Output(func, out)

    def take(self, place: tuple[int, int], func: Any) -> _Output | None:
        """What the op at this place returned; None where it was handed out before, in an earlier backward."""
        output = self._outputs.pop(place, None)
        if output is not None and output.func is not func:
            raise ConflictError(
                f"the forward of {self.unit} took another path when it ran again: {func} instead of {output.func}",
                remedy=f"Use `save` or `offload` on {self.unit}.",
            )
        if output is not None and (tensor := output.changed()) is not None:
            raise InPlaceError(
                f"an output that {self.unit} kept (shape {tuple(tensor.shape)}) has been modified by an inplace "
                "operation between forward and backward",
                remedy=f"Use `recompute` on {self.unit}, or change a copy of its output.",
            )
        return output

    def check(self) -> None:
        """The first forward has ended. Raises ConflictError where it changed a kept output in place."""
        for output in self._outputs.values():
            if (tensor := output.changed()) is not None:
                raise ConflictError(
                    f"{self.unit} changes an output of {output.func} (shape {tuple(tensor.shape)}) in place, so it "
                    "cannot be kept",
                    remedy=f"Use `recompute` on {self.unit}, or leave that module out of what is kept.",
                )


class _Scope(TorchDispatchMode):
    def __init__(self, frame: Frame, number: int, wanted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._frame, self._number, self._wanted = frame, number, wanted
        self._ops = 0

    def __enter__(self) -> Self:
        self._frame._inside = True
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._frame._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._wanted(func) or draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        self._ops += 1
        place = (self._number, self._ops)
        if self._frame.recording:
            out = func(*args, **kwargs)
            self._frame.keep(place, func, out)
            return out
        kept = self._frame.take(place, func)
        return func(*args, **kwargs) if kept is None else kept.again()


class KeepingReplay(Replay):
    """A replay in whose forwards scopes find their frame."""

    def __init__(self, module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(module, state, args, kwargs)
        self.frame = Frame(state.unit)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self.frame.begin(recording=self.first is not None)
        outer = getattr(_current, "frame", None)
        _current.frame = self.frame
        try:
            return super().__call__(*tensors)
        finally:
            _current.frame = outer

    def finish(self, versions: list[int]) -> None:
        super().finish(versions)
        self.frame.check()


class _AttentionCalls(TorchFunctionMode):
    """Opens a scope around calls of fused attention alone: seeing functions costs far less than seeing every op."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._frame.inside or ("attention" not in name and "attn" not in name):
            return func(*args, **(kwargs or {}))
        with self._frame.scope(is_attention):
            return func(*args, **(kwargs or {}))


class ScopeState(Attachment):
    """The attachment of a module inside a unit whose products are kept, or with ``attention`` its fused attentions."""

    def __init__(self, unit: str, *, attention: bool = False) -> None:
        super().__init__(unit)
        self.attention = attention


def run_scope(module: nn.Module, state: ScopeState, /, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, with the outputs of its heavy ops kept where its unit is being kept track of."""
    frame: Frame | None = getattr(_current, "frame", None)
    if not state.active or frame is None or frame.unit != state.unit or frame.inside:
        return call_inner(module, state, args, kwargs)
    with _AttentionCalls(frame) if state.attention else frame.scope(is_heavy):
        return call_inner(module, state, args, kwargs)
