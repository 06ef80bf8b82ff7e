"""How a choice is attached to a module: as the instance's own ``forward``. Nothing else of the module changes.

A policy attaches one kind of choice to live modules; the table of them is in ``__init__``. It attaches a function of
the module and a state. Module hooks, ``state_dict``, parameter names and the class stay what they are. With a plain
closure a deepcopy would run the original's weights, and a bound method cannot be pickled. A partial over a module-level
function can be copied and pickled, because module and state are ordinary arguments of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, MethodType
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[reportPrivateImportUsage]

from autockpt.checkpointing.arguments import hooks_in_force
from autockpt.checkpointing.divergence import DivergenceCheck, UnitCheck
from autockpt.checkpointing.replay_context import current_transform
from autockpt.checkpointing.unit import CheckpointedUnit
from autockpt.devices.transport import OffloadTransports, Transports
from autockpt.errors import ConflictError, PlanError
from autockpt.policies.compiling import at_trace_time, skip_frames
from autockpt.schema.choices import ATTENTION, Choice
from autockpt.schema.names import fold, strip_prefixes

# The frames that call a module's forward: they know the module, which a partial over another one does not.
_CALL = nn.Module._call_impl.__code__
_CALL_WITH_HOOKS = next(c for c in _CALL.co_consts if isinstance(c, CodeType) and c.co_name == "inner")


@at_trace_time
def warn(text: str) -> None:
    """Give a warning, also while the compiler traces."""
    warnings.warn(text, stacklevel=6)


class Attachment:
    """State of one attached forward. Copied and pickled with its module, without ``_cache…`` and ``restored_set``.

    ``inner`` is the forward that the instance had before (None: its class's), ``unbound`` the same as a function of the
    module where it can be had: a library's wrapper around ours may end up on a copy of the module. An attachment that
    could not be taken off because somebody wrapped it is made inert by ``active = False``. ``uncompiled``: before a
    module of PyTorch's own, which the compiler takes on only as a part of what is around it. Where something else is
    handed to backward than forward saved (``has_check``), the session sets a ``check``; of a plan with several sets it
    sets ``restored_set``, a context manager for recomputations, which restores the set active in forward.
    """

    has_check: ClassVar[bool] = False
    check: UnitCheck

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.inner: Callable[..., Any] | None = None
        self.unbound: Callable[..., Any] | None = None
        self.active, self.uncompiled, self.warned = True, False, False
        self._cache_unit: Any = None
        self.restored_set: Callable[[], AbstractContextManager[None]] | None = None

    def switch(self, on: bool) -> None:
        """The forward is this attachment's from now on, or no longer."""

    def warn_once(self, text: str) -> None:
        """Give a warning, unless this attachment has given one."""
        if not self.warned:
            self.warned = True
            warn(text)

    def current_unit(self, module: nn.Module) -> Any:
        """What was learned from calls of a recomputed unit; forgotten where its modules are others by now."""
        unit = self._cache_unit
        if unit is None or unit.module is not module or not unit.has_same_modules():
            unit = self._cache_unit = self.new_unit(module)
        return unit

    def new_unit(self, module: nn.Module) -> CheckpointedUnit:
        """A unit of which nothing was learned yet."""
        return CheckpointedUnit(self.unit, module, self.check)

    def __getstate__(self) -> dict[str, Any]:
        return {k: None if k.startswith("_cache") or k == "restored_set" else v for k, v in self.__dict__.items()}


def is_enabled(state: Attachment) -> bool:
    """Whether a choice acts in this call: gradients are enabled, and the plan is not removed.

    Units save everything inside forward-mode AD (``torch.autograd.forward_ad``) and the transforms of ``torch.func``:
    recomputed tensors would have no tangent, or be outside of the transform. So they do where a program is made of
    their ops (``torch.export``, ``torch.jit.trace``, ``make_fx``), and inside of a ``torch.utils.checkpoint`` of the
    user's. That drops what the unit saves and runs it again, without restoring what its forward has changed. Warns once
    of that.
    """
    if not state.active or not torch.is_grad_enabled() or torch.compiler._is_exporting_flag:  # see ``eagerly``
        return False
    if torch.compiler.is_compiling():
        return True
    if forward_ad._current_level >= 0 or current_transform() is not None or is_tracing():
        return False
    fx = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if fx is not None and fx.get_proxy_mode() is not None:
        return False
    hooks = hooks_in_force(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":  # not the reentrant one: that has no gradients
        return True
    state.warn_once(
        f"{state.unit} runs inside of a torch.utils.checkpoint, which drops what it saves and runs it again in "
        "backward: there its choice does nothing. Take the checkpoint away for the plan to act."
    )
    return False


class AttachedForward(functools.partial):
    """``run(module, state, *args, **kwargs)`` in the place of a module's forward; has that forward's signature."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module, state = self.args
        # accelerate, unwrapping a model, binds again what is bound already
        args = args[1:] if args and args[0] is module else args
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            if caller.f_code is _CALL or caller.f_code is _CALL_WITH_HOOKS:
                module = _called(caller.f_locals["self"], module, state.unit)
        return self.func(module, state, *args, **kwargs)

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
        module, state = self.args
        return type(module).forward.__get__(module) if state.inner is None else state.inner


class _UncompiledForward(AttachedForward):
    """Before a module of PyTorch's own, which the compiler takes on only as a part of what is around it."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module, state = self.args
        return self.func(module, state, *args, **kwargs)


skip_frames(_UncompiledForward.__call__)


def _called(caller: nn.Module, module: nn.Module, unit: str) -> nn.Module:
    """The module whose forward runs: that of the plan, or a shallow copy of it (``copy.copy``).

    A library's module around it may have its forward as well: PEFT's, while a prompt is disabled. Raises ConflictError
    for any other that has got this forward.
    """
    if caller is module or (type(caller) is type(module) and caller._parameters is module._parameters):
        return caller
    if is_library(type(caller)) and any(inner is module for inner in caller.modules()):
        return module
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


def inner_of(module: nn.Module, state: Attachment) -> Callable[..., Any]:
    """The forward that the attachment stands before. The class is read each time: FSDP2 exchanges it."""
    if state.unbound is not None:
        return functools.partial(state.unbound, module)
    return functools.partial(type(module).forward, module) if state.inner is None else state.inner


def call_inner(module: nn.Module, state: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward that the attachment stands before."""
    return inner_of(module, state)(*args, **kwargs)


def take_off(module: nn.Module, forward: AttachedForward | Unbound) -> None:
    """Undo ``Session.place``. Where another forward was put over it since, that one stays and ours becomes inert."""
    forward.state.active = False
    forward.state.switch(False)
    if module.__dict__.get("forward") is not forward:
        return
    if forward.state.inner is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward.state.inner


def attached_to(module: nn.Module) -> AttachedForward | Unbound | None:
    """The active attachment on a module, also where others wrapped its forward since."""
    forward = module.__dict__.get("forward")
    while forward is not None:
        if isinstance(forward, AttachedForward | Unbound):
            if forward.state.active:
                return forward
            forward = forward.state.inner
        elif isinstance(forward, MethodType):
            forward = forward.__func__
        else:
            forward = getattr(forward, "__wrapped__", None)
    return None


def remove(model: nn.Module) -> None:
    """Take every attached choice off a model, whoever attached it: for copies and loaded pickles, which carry a plan
    without its session. Idempotent."""
    for module in model.modules():
        while (forward := attached_to(module)) is not None:
            take_off(module, forward)


def attached_path(model: nn.Module) -> str | None:
    """Where in the model a choice is attached, by name; the root is the empty one. None: nowhere."""
    return next((path for path, module in model.named_modules() if attached_to(module) is not None), None)


_NAMES = """
    torch torchvision torchaudio transformers peft accelerate diffusers timm deepspeed sentence_transformers
    bitsandbytes liger_kernel lightning pytorch_lightning autockpt
"""
_LIBRARIES = frozenset(_NAMES.split())


class PlannedUnit(NamedTuple):
    """One unit of a plan on a live model. ``row_wise``: modules inside that compute each token by itself, by path."""

    name: str
    module: nn.Module
    choice: Choice
    row_wise: Mapping[str, nn.Module] = {}


class ForwardListener(Protocol):
    """Notified by the session when a forward pass of the whole model begins and ends. Copied with the model."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


Attach = Callable[[PlannedUnit, "Session"], None]
"""A policy: attaches its choice to one unit. It is called for the units of a plan in order of execution. Raises
ConflictError where that cannot be made safe."""


def attach_nothing(unit: PlannedUnit, session: Session) -> None:
    """Autograd keeps what it needs, as PyTorch does by itself. Nothing is attached, so it costs nothing."""


def modules_named(unit: PlannedUnit, names: Sequence[str], what: str, *, called: bool = True) -> dict[str, nn.Module]:
    """Modules by their names inside of a unit.

    Raises PlanError, which says for ``what``, where there is none of that name, or none with a forward where it must be
    ``called``.
    """
    inside = {strip_prefixes(path): module for path, module in unit.module.named_modules() if path}
    for name in names:
        if name not in inside or (called and isinstance(inside[name], nn.ModuleList | nn.ModuleDict)):
            leaves = [path for path, module in inside.items() if not any(True for _ in module.children())]
            forward = "with a forward " if name in inside else ""
            raise PlanError(
                f"{unit.name} has no module named {name!r} {forward}{what}",
                remedy=f"Name modules as seen from the unit, or {ATTENTION!r}; it has: {', '.join(leaves)}.",
            )
    return {name: inside[name] for name in names}


def is_library(cls: type) -> bool:
    """Whether a class is PyTorch's or that of a library around it, and not the user's own."""
    return cls.__module__.partition(".")[0] in _LIBRARIES


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer; the CPU for a module without either."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


@dataclass(eq=False, repr=False)
class Session:
    """Choices attached to a model, until ``remove``. Also a context manager, at whose end they are removed.

    ``order`` holds every unit of the plan, whatever its choice, in the order in which the model calls them.
    ``transports`` gives the transport between a device and a tier. ``placed`` are the forwards that were placed on
    modules. ``guard`` is the attachment of the whole model, which notifies ``listeners`` of its forward passes; None
    where nothing was attached.
    """

    transports: Transports
    sentinels: DivergenceCheck = field(default_factory=DivergenceCheck)
    order: Sequence[PlannedUnit] = ()
    listeners: list[ForwardListener] = field(default_factory=list)
    placed: list[tuple[nn.Module, AttachedForward]] = field(default_factory=list)
    guard: Any = None

    def place(self, module: nn.Module, run: Callable[..., Any], state: Attachment) -> None:
        """Make ``run(module, state, *args, **kwargs)`` the module's forward until the session is removed.

        It stands before the module's present one.
        """
        if state.has_check:
            state.check = self.sentinels.unit(state.unit)
        state.inner = inner = module.__dict__.get("forward")
        if isinstance(inner, AttachedForward) or (isinstance(inner, MethodType) and inner.__self__ is module):
            state.unbound = inner.__func__
        forward = (_UncompiledForward if state.uncompiled else AttachedForward)(run, module, state)
        module.__dict__["forward"] = forward
        self.placed.append((module, forward))
        state.switch(True)

    @property
    def attached(self) -> dict[str, str]:
        """What is done with each unit's activations, in words."""
        return {unit.name: f"{unit.choice}: {unit.choice.says()}" for unit in self.order}

    @property
    def host_bytes(self) -> int:
        """Most bytes that offloading claimed on the host so far; 0 where the caller passed other transports."""
        return self.transports.use.peak if isinstance(self.transports, OffloadTransports) else 0

    def describe(self, indent: str = "  ") -> Iterator[str]:
        """What is attached, in lines."""
        folded = fold(self.attached)
        width = max(map(len, folded), default=0)
        return (f"{indent}{name:<{width}}  {words}" for name, words in folded.items())

    def remove(self) -> None:
        """Take everything off again; the model is as it was. Idempotent.

        Graphs of forwards that have run already keep working, except under choices with ``tiles``.
        """
        for module, forward in reversed(self.placed):
            if forward.state.active:  # else another plan may be on the module by now
                take_off(module, forward)

    def reattach(self) -> Self:
        """Attach again what was removed, the very same objects: a compiler finds the code that it made for them.

        In a ``with`` it is removed again at the end. Raises ConflictError where something else is attached now.
        """
        for module, forward in self.placed:
            if module.__dict__.get("forward") is not forward.state.inner:
                self.remove()
                raise ConflictError(
                    f"{forward.state.unit or 'the model'} has another forward than when the choice was attached first",
                    remedy="Attach the choices again.",
                )
            forward.state.active = True
            module.__dict__["forward"] = forward
            forward.state.switch(True)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()
