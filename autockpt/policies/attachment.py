"""How a choice sits on a module: as the instance's own ``forward``, so that nothing else about the module changes.

Module hooks, ``state_dict``, parameter names and the class stay what they are. A plain closure would make a deepcopy
run the original's weights, and a bound method does not survive pickling: a partial over a module-level function does
both, because module and state are ordinary arguments of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, MethodType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad

from autockpt.checkpointing.divergence import FIRST_CALLS, UnitCheck
from autockpt.errors import ConflictError
from autockpt.policies.compiling import exports, run_as_it_is

_current_transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level  # type: ignore[attr-defined]
_MAKE_FX = torch._C._TorchDispatchModeKey.PROXY
_CALL = nn.Module._call_impl.__code__
_CALL_WITH_HOOKS = next(c for c in _CALL.co_consts if isinstance(c, CodeType) and c.co_name == "inner")
_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_hooks_in_force: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


class Attachment:
    """What one attached forward knows. Copied and pickled with its module; ``_cache…`` fields are left behind.

    ``inner`` is the forward that the instance had before (None: its class's), ``unbound`` the same as a function of the
    module where it can be had: a library's wrapper around ours may end up on a copy of the module. An attachment that
    could not be taken off because somebody wrapped it is made inert by ``active = False``; one that is ``gone`` is not
    put back either. Where something else is handed to backward than forward saved, a session may set a ``check`` over
    it (``has_check``). ``as_it_is``: before a module of PyTorch's own, which the compiler does not take on by itself.
    ``_cache_unit`` holds what calls of a unit that runs again have taught. Of several sets of choices, ``_cache_turn``
    has the attachment's own act while it runs again.
    """

    has_check: ClassVar[bool] = False

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.inner: Callable[..., Any] | None = None
        self.unbound: Callable[..., Any] | None = None
        self.active, self.gone, self.as_it_is, self.warned = True, False, False, False
        self.check: UnitCheck | None = None
        self._first_calls = FIRST_CALLS
        self._cache_unit: Any = None
        self._cache_turn: Callable[[], AbstractContextManager[None]] | None = None

    def in_mid_training(self) -> None:
        """Take the next call for the last of those in which more is looked at than later."""
        self._first_calls = 1
        if self._cache_unit is not None:
            self._cache_unit.in_mid_training()

    def turn(self) -> AbstractContextManager[None]:
        """Around running again: the modules inside are attached to as they were in forward."""
        return nullcontext() if self._cache_turn is None else self._cache_turn()

    def __getstate__(self) -> dict[str, Any]:
        return {k: None if k.startswith("_cache") else v for k, v in self.__dict__.items()}


def is_enabled(state: Attachment) -> bool:
    """Whether a choice has anything to do in this call: gradients are wanted, and the plan is not taken off.

    Inside forward-mode AD (``torch.autograd.forward_ad``) and the transforms of ``torch.func`` units save as ever: what
    is dropped, moved or made again would come back without its tangent, or outside of the transform. So they do where
    hooks on saved tensors are switched off (``torch.autograd.graph.disable_saved_tensors_hooks``), and where a program
    is made of their ops (``torch.export``, ``torch.jit.trace``, ``make_fx``). Inside of a ``torch.utils.checkpoint`` of
    the user's, too: that drops what the unit saves and runs it again as plain training does, without putting back what
    its forward has changed. Warns once of that.
    """
    if not state.active or not torch.is_grad_enabled() or exports():
        return False
    if torch.compiler.is_compiling():
        return True
    if forward_ad._current_level >= 0 or _current_transform() is not None or not _hooks_allowed():
        return False
    if torch._C._is_tracing() or torch._C._get_dispatch_mode(_MAKE_FX) is not None:
        return False
    hooks = _hooks_in_force(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":  # not the reentrant one: that has no gradients
        return True
    if not state.warned:
        state.warned = True
        warnings.warn(
            f"{state.unit} runs inside of a torch.utils.checkpoint, which drops what it saves and runs it again in "
            "backward: there its choice does nothing. Take the checkpoint away for the plan to act.",
            stacklevel=4,
        )
    return False


class AttachedForward(functools.partial):
    """``run(module, state, *args, **kwargs)`` in the place of a module's forward; has that forward's signature."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module, state = self.args
        # accelerate, unwrapping a model, binds once more what is bound already
        args = args[1:] if args and args[0] is module else args
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            if caller.f_code is _CALL or caller.f_code is _CALL_WITH_HOOKS:
                module = _called(caller.f_locals["self"], module, state.unit)
        return self.func(module, state, *args, **kwargs)

    @property
    def module(self) -> nn.Module:
        return self.args[0]

    @property
    def state(self) -> Attachment:
        return self.args[1]

    @property
    def __func__(self) -> Unbound:
        # accelerate wraps what is behind a method and binds it again, when it prepares a model and when it unwraps it
        return Unbound(self.func, self.state)

    @property
    def __signature__(self) -> inspect.Signature:
        # the Trainer and generate() read which arguments a model takes from here
        return inspect.signature(self._plain())

    def __getattr__(self, name: str) -> Any:
        # filters of arguments read them from the code
        if name in ("__name__", "__qualname__", "__code__"):
            return getattr(self._plain(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _plain(self) -> Callable[..., Any]:
        module = self.module
        return type(module).forward.__get__(module) if self.state.inner is None else self.state.inner


class _UncompiledForward(AttachedForward):
    """Before a module of PyTorch's own, which the compiler takes on only as a part of what is around it."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module, state = self.args
        return self.func(module, state, *args, **kwargs)


run_as_it_is(_UncompiledForward.__call__)


def _called(caller: nn.Module, module: nn.Module, unit: str) -> nn.Module:
    """The module whose forward runs: that of the plan, or a shallow copy of it (``copy.copy``).

    Raises ConflictError for any other that has got this forward.
    """
    if caller is module or (type(caller) is type(module) and caller._parameters is module._parameters):
        return caller
    raise ConflictError(
        f"a {type(caller).__name__} has the forward that a plan placed on {unit or 'another module'}, as where "
        "attributes are copied from module to module: it would compute with the other's weights",
        remedy="Apply the plan to the modules that train, once they are made; or copy modules by copy.copy.",
    )


class Unbound:
    """An attached forward that is not bound to its module yet."""

    def __init__(self, run: Callable[..., Any], state: Attachment) -> None:
        self.run, self.state = run, state

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(module, self.state, *args, **kwargs)


def call_inner(module: nn.Module, state: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward that the attachment stands before. The class is asked anew each time: FSDP2 exchanges it."""
    if state.unbound is not None:
        return state.unbound(module, *args, **kwargs)
    if state.inner is None:
        return type(module).forward(module, *args, **kwargs)
    return state.inner(*args, **kwargs)


def place(module: nn.Module, run: Callable[..., Any], state: Attachment) -> AttachedForward:
    """Put an attachment before the module's present forward."""
    state.inner = inner = module.__dict__.get("forward")
    if isinstance(inner, AttachedForward) or (isinstance(inner, MethodType) and inner.__self__ is module):
        state.unbound = inner.__func__
    forward = (_UncompiledForward if state.as_it_is else AttachedForward)(run, module, state)
    module.__dict__["forward"] = forward
    return forward


def take_off(module: nn.Module, forward: AttachedForward) -> None:
    """Undo ``place`` exactly. Where another forward was put over it since, that one stays and ours becomes inert."""
    forward.state.active = False
    if module.__dict__.get("forward") is not forward:
        return
    if forward.state.inner is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward.state.inner


def put_back(module: nn.Module, forward: AttachedForward) -> None:
    """Undo ``take_off``. Raises ConflictError where the module's forward is another one now."""
    if forward.state.gone:
        return
    if module.__dict__.get("forward") is not forward.state.inner:
        raise ConflictError(
            f"{forward.state.unit or 'the model'} has another forward than when the choice was attached first",
            remedy="Attach the choices anew.",
        )
    forward.state.active = True
    module.__dict__["forward"] = forward


def attached_to(module: nn.Module) -> AttachedForward | None:
    """The active attachment on a module, also where others wrapped its forward since."""
    forward = module.__dict__.get("forward")
    while forward is not None:
        if isinstance(forward, Unbound):
            forward = AttachedForward(forward.run, module, forward.state)
        if isinstance(forward, AttachedForward):
            if forward.state.active:
                return forward
            forward = forward.state.inner
        elif isinstance(forward, MethodType):
            forward = forward.__func__
        else:
            forward = getattr(forward, "__wrapped__", None)
    return None
