"""Choices attached to a live model, and what is looked after for the model as a whole while they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from autockpt.checkpointing.divergence import Mode, sentinels_of
from autockpt.checkpointing.kv_cache import DROPPED, holds_cache, parameter_names
from autockpt.devices.transport import OffloadTransports, Transports
from autockpt.errors import ConflictError, PlanError
from autockpt.interpreter import with_room
from autockpt.policies import POLICIES
from autockpt.policies.base import (
    Attachment,
    ForwardListener,
    PlannedUnit,
    Session,
    attached_path,
    call_inner,
    is_library,
)
from autockpt.policies.conflicts import refuse_lazy, refuse_native, refuse_wrappers, with_switches
from autockpt.policies.gathered import keep_gathered
from autockpt.schema.choices import Choice
from autockpt.schema.names import ancestors, check_nesting
from autockpt.schema.plan import CompileMode
from autockpt.workload.units import discover_units, modules_of, named_units, row_wise, unwrap

_RENAMED = "cache"  # past_key_values since transformers 5.24
# what models call a cache, also one that is a tuple of tensors or an object of their own
_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "cache_params", _RENAMED)


def attach(
    model: nn.Module,
    choices: Mapping[str, Choice],
    *,
    transport: Transports | None = None,
    host_budget: int | None = None,
    sentinels: Mode | None = None,
) -> Session:
    """Attach choices to a live model.

    ``choices`` are by exact unit name, in order of execution, free of wrapper prefixes (PEFT, compile, DDP, Lightning);
    units that are not named save. ``transport`` gives what replaces the device's own for offload, by device and tier;
    those claim no more than ``host_budget`` bytes of host memory, and a forward that would need more raises
    HostBudgetExceeded. ``sentinels`` say how often what runs again or comes back is checked (None: as the environment
    says). From here on the choices act whenever gradients are enabled, in ``eval()`` too. Where every choice is
    ``save`` nothing at all is attached.

    Raises PlanError for a name that the model does not have and for a choice inside another; ConflictError where a plan
    is attached already, the model's own activation checkpointing is on, or a choice cannot be made safe. The model is
    then as it was.
    """
    transports = OffloadTransports(host_budget) if transport is None else transport
    with ExitStack() as undo:
        session = undo.enter_context(Session(transports, sentinels_of(sentinels)))
        attach_units(model, choices, session)
        if session.placed:
            look_after(model, session)
        undo.pop_all()  # no error came, so it stays
    return session


def attach_units(model: nn.Module, choices: Mapping[str, Choice], session: Session) -> None:
    """Attach choices to units as ``attach`` does; whoever calls this looks after the model as a whole, and removes what
    was attached where an error comes."""
    check_nesting(choices)
    modules = modules_of(model, list(choices))
    session.order = units = [
        PlannedUnit(name, inner := unwrap(module), choice, row_wise(inner))
        for (name, choice), module in zip(choices.items(), modules, strict=True)
    ]
    _check_free(model, units)
    kinds = list(POLICIES)
    for unit in sorted(units, key=lambda unit: kinds.index(unit.choice.kind)):
        POLICIES[unit.choice.kind](unit, session)
    for unit in units:
        if unit.choice.gathered:
            keep_gathered(unit, session)
    if session.sentinels.mode != "off":  # which counts forwards under sets that save everything, too
        session.listeners.append(session.sentinels)


def without_kv_cache(model: nn.Module) -> Session:
    """What a plan does to the model besides its choices, and nothing else: plain training to compare a plan with.

    The KV cache changes the order of sums, so with it even plain training has other last bits.
    """
    session = Session(OffloadTransports())
    blocks = modules_of(model, [unit.name for unit in discover_units(model) if unit.role == "block"])
    switch_cache_off(model, blocks, session)
    return session


def _check_free(model: nn.Module, units: Sequence[PlannedUnit]) -> None:
    names: dict[int, str] = {}
    for unit in units:
        if (other := names.setdefault(id(unit.module), unit.name)) != unit.name:
            raise PlanError(
                f"{other} and {unit.name} are one and the same module",
                remedy="Make a choice for one of the names only.",
            )
    if (path := attached_path(model)) is not None:
        raise ConflictError(
            f"a plan is applied to this model already (at {path or 'its root'})",
            remedy="Remove it first: handle.remove(), or autockpt.runtime.remove(model) for a copied model.",
        )
    refuse_wrappers(model)
    for unit in units:
        refuse_lazy(unit.module, unit.name)


def look_after(model: nn.Module, session: Session) -> GuardState:
    """Attach, around units with choices, what looks after the model as a whole."""
    switch_cache_off(model, [unit.module for unit in session.order if unit.choice.kind != "save"], session)
    root = unwrap(model)
    state = session.guard = GuardState(root, session.listeners)
    session.place(root, run_guarded, state)
    return state


class GuardState(Attachment):
    """The root's attachment: who wants to know about forward passes, and which switches must stay off.

    ``planned`` are the largest batch size and sequence length that the plan's promise covers, where known (or None).
    ``sets`` are the several sets of choices of which one acts in each forward (``choice_sets.BatchSets``).
    ``switches`` are the modules with a switch of their own for activation checkpointing.
    """

    def __init__(self, root: nn.Module, listeners: list[Any]) -> None:
        super().__init__("")
        self.listeners = listeners
        self.planned: tuple[int | None, ...] = ()
        self.sets: Any = None
        self.switches = with_switches(root)


def run_guarded(module: nn.Module, state: GuardState, /, *args: Any, **kwargs: Any) -> Any:
    """The whole model's forward. Raises ConflictError where a trainer switched on checkpointing of its own since."""
    if not state.active or not torch.is_grad_enabled():
        return call_inner(module, state, args, kwargs)
    for path, inner in state.switches:
        refuse_native(inner, path)
    if state.planned and not state.warned:
        _warn_of_larger_batch(state, args, kwargs)
    listeners = state.listeners if state.sets is None else state.sets.begin(module, args, kwargs)

    def forward() -> Any:
        for listener in listeners:
            listener.begin()
        return call_inner(module, state, args, kwargs)

    if torch.compiler.is_dynamo_compiling():  # which goes on after no graph break inside of a `try`
        output = forward()
        _end(listeners)
        return output
    try:
        return with_room(forward)  # however deep in the user's own calls this is
    finally:
        _end(listeners)


def _end(listeners: Iterable[ForwardListener]) -> None:
    """The model's forward has ended, well or not."""
    for listener in listeners:
        listener.end()


def _warn_of_larger_batch(state: GuardState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say once that the promise no longer holds; shapes are those of the token ids, else of the first tensor with a
    batch dimension, as where the plan was made."""
    values = (kwargs.get("input_ids"), *args, *kwargs.values())
    first = next((v for v in values if isinstance(v, torch.Tensor) and v.dim() > 0), None)
    pairs = [] if first is None else [(n, most) for n, most in zip(first.shape, state.planned, strict=False) if most]
    if any(n > most for n, most in pairs):
        here, planned = (" × ".join(map(str, sizes)) for sizes in zip(*pairs, strict=True))
        state.warn_once(
            f"a batch of {here} is larger than the plan was made for ({planned}): its promise about memory no longer "
            "holds. Search again with the larger shape."
        )


class CacheState(Attachment):
    """The attachment that keeps a language model from building a KV cache in training steps.

    ``names`` are those of the forward's parameters: asked once, as a compiler cannot.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("")
        self.names = parameter_names(type(module))


def run_without_cache(module: nn.Module, state: CacheState, /, *args: Any, **kwargs: Any) -> Any:
    """The model's forward with ``use_cache`` off wherever gradients are enabled. The config stays as it is.

    A forward that is given a cache runs as the caller wants: the cache is read later. Where plain training would return
    one, the output holds an object that raises an error when it is used.
    """
    if not state.active or not torch.is_grad_enabled():
        return call_inner(module, state, args, kwargs)
    compiling = torch.compiler.is_compiling()
    given = {**dict(zip(state.names, args, strict=False)), **kwargs}
    has_cache = any([given.get(name) is not None for name in _CACHES])
    if not compiling:
        has_cache = any([holds_cache(value) for value in (*args, *kwargs.values())]) or has_cache
    if has_cache:
        return call_inner(module, state, args, kwargs)
    if (place := state.names.index("use_cache")) < len(args):
        args = (*args[:place], False, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "use_cache": False}
    if compiling:
        return call_inner(module, state, args, kwargs)
    asked = given.get("use_cache")
    wanted = asked or (asked is None and getattr(getattr(module, "config", None), "use_cache", False))
    if wanted:
        _refuse_packed(given)
    output = call_inner(module, state, args, kwargs)
    if wanted:
        _say_dropped(output)
    return output


def _refuse_packed(given: Mapping[str, Any]) -> None:
    """Raise ConflictError for packed sequences by their positions alone, which transformers keeps apart without a cache
    and not with one (``masking_utils.find_packed_sequence_indices``)."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None or positions.dim() != 2 or mask is not None or bool((positions.diff(dim=-1) == 1).all()):
        return
    raise ConflictError(
        "packed sequences (position_ids that begin again, no attention_mask) see those before them with use_cache on, "
        "and a plan, which switches the cache off, would keep them apart",
        remedy="Pass use_cache=False to the model, without a plan too, to keep them apart; or an attention_mask.",
    )


def _say_dropped(output: Any) -> None:
    """Past the output's own ``__setattr__``, which would move what follows in the tuple."""
    name = _RENAMED if _RENAMED in getattr(output, "__dataclass_fields__", ()) else "past_key_values"
    if getattr(output, name, output) is None:
        with suppress(AttributeError):  # a class without room for it
            object.__setattr__(output, name, DROPPED)


def switch_cache_off(model: nn.Module, units: Iterable[nn.Module], session: Session) -> None:
    """Attach ``run_without_cache`` to the modules around units whose forward takes a library's ``use_cache``, whichever
    of them is called; units themselves do not count. What classes of somebody's own mean by that name is theirs to
    know."""
    attached = {id(unit) for unit in units}
    for module in model.modules():
        takes = id(module) not in attached and _takes_use_cache(type(module))
        if takes and any(id(inner) in attached for inner in module.modules()):
            session.place(module, run_without_cache, CacheState(module))


def _takes_use_cache(cls: type[nn.Module]) -> bool:
    of_a_library = any(is_library(owner) and not owner.__module__.startswith("torch.") for owner in cls.__mro__)
    return of_a_library and "use_cache" in parameter_names(cls)


def compiled_as(model: nn.Module, blocks: Iterable[str]) -> CompileMode | None:
    """How a live model's steps are compiled, as far as its modules show: ``blocks`` are the names of its layers.

    ``layers`` where one of these is, by ``layer.compile()`` or ``torch.compile(layer)``; ``model`` where a module
    around them is; None for neither. What compiles a function around the whole step is not seen from here.
    """
    compiled = {
        name
        for name, module in named_units(model)
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules
    }
    blocks = tuple(blocks)
    if not compiled.isdisjoint(blocks):
        return "layers"
    around = {"", *(outer for name in blocks for outer in ancestors(name))}
    return None if compiled.isdisjoint(around) else "model"
