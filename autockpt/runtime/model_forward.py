"""What must be looked after for the model as a whole while choices are attached to its units."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from autockpt.callstack import with_room
from autockpt.errors import ConflictError
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import ForwardListener, is_library
from autockpt.policies.conflicts import refuse_native
from autockpt.policies.kv_cache import CACHE_NAMES, DROPPED, holds_cache, only_own_caches, parameter_names

_RENAMED = "cache"  # past_key_values since transformers 5.24


class Sets(Protocol):
    """Several sets of choices, one of which is attached to each forward of the model (``choice_sets``)."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[ForwardListener]:
        """A forward begins; who is to be told."""
        ...

    def end(self) -> None:
        """It has ended."""


class GuardState(Attachment):
    """The root's attachment: who wants to know about forward passes, and which switches must stay off.

    ``planned`` are the largest batch size and sequence length that the plan's promise covers, where known.
    """

    def __init__(self, flagged: Iterable[str]) -> None:
        super().__init__("")
        self.flagged = tuple(flagged)
        self.listeners: list[ForwardListener] = []
        self.planned: tuple[int | None, int | None] = (None, None)
        self.sets: Sets | None = None

    def watched(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Modules with a switch of their own for activation checkpointing, found by path so that copies find theirs."""
        for path in self.flagged:
            module: nn.Module | None = root
            for part in path.split(".") if path else ():
                module = module._modules.get(part) if module is not None else None
            if module is not None:
                yield path, module


def run_guarded(module: nn.Module, state: GuardState, /, *args: Any, **kwargs: Any) -> Any:
    """The whole model's forward. Raises ConflictError where a trainer switched on checkpointing of its own since."""
    if not state.active or not torch.is_grad_enabled():
        return call_inner(module, state, args, kwargs)
    for path, watched in state.watched(module):
        refuse_native(watched, path)
    _warn_of_larger_batch(state, args, kwargs)
    listeners = state.listeners if state.sets is None else state.sets.begin(module, args, kwargs)
    for listener in listeners:
        listener.begin()
    if torch.compiler.is_dynamo_compiling():
        output = call_inner(module, state, args, kwargs)
    else:  # however deep in the user's own calls this is
        output = with_room(functools.partial(call_inner, module, state, args, kwargs))
    for listener in listeners:
        listener.end()
    if state.sets is not None:
        state.sets.end()
    return output


def _warn_of_larger_batch(state: GuardState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say once that the promise no longer holds; shapes are those of the first tensor with a batch dimension."""
    batch, length = state.planned
    if batch is None and length is None:
        return
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() > 0), None)
    if first is None:
        return
    tokens = first.dim() == 2 and not first.is_floating_point()
    too_many = batch is not None and first.shape[0] > batch
    too_long = length is not None and tokens and first.shape[1] > length
    if too_many or too_long:
        state.planned = (None, None)
        planned = " × ".join(str(n) for n in (batch, length if tokens else None) if n is not None)
        warnings.warn(
            f"a batch of {' × '.join(map(str, first.shape[: 2 if tokens else 1]))} is larger than the plan was made "
            f"for ({planned}): its promise about memory no longer holds. Search again with the larger shape.",
            stacklevel=4,
        )


class CacheState(Attachment):
    """The attachment that keeps a language model from building a KV cache in training steps.

    ``position`` is where ``use_cache`` stands among the forward's parameters, ``caches`` where caches do, by name:
    asked once, as a compiler cannot. ``known``: it is a library's, which reads no cache again that it makes itself.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("")
        names = parameter_names(type(module))
        self.position = names.index("use_cache")
        caches = sorted(CACHE_NAMES | {_RENAMED})
        self.caches = {name: names.index(name) if name in names else len(names) for name in caches}
        self.packing = {name: names.index(name) for name in ("position_ids", "attention_mask") if name in names}
        self.known = is_library(type(module))
        self.warned = False


def run_without_cache(module: nn.Module, state: CacheState, /, *args: Any, **kwargs: Any) -> Any:
    """The model's forward with ``use_cache`` off wherever gradients are enabled. The config stays as it is.

    With a cache that it is given all is as the caller wants it: somebody reads it. Where there would be one in the
    output, something stands in its place that tells whoever uses it.
    """
    if not state.active or not torch.is_grad_enabled():
        return call_inner(module, state, args, kwargs)
    compiling = torch.compiler.is_compiling()
    given = any(
        kwargs.get(name) is not None or (place < len(args) and args[place] is not None)
        for name, place in state.caches.items()
    )
    if not compiling:
        given = any([holds_cache(value) for value in (*args, *kwargs.values())]) or given
    if given:
        with nullcontext() if compiling else only_own_caches(False):
            return call_inner(module, state, args, kwargs)
    position = state.position
    if position < len(args):
        asked = args[position]
        args = (*args[:position], False, *args[position + 1 :])
    else:
        asked = kwargs.get("use_cache")
        kwargs = {**kwargs, "use_cache": False}
    if asked and not state.warned:
        state.warned = True
        warnings.warn(
            "use_cache=True is switched off while gradients are enabled and an autockpt plan is applied: "
            "the outputs hold no past_key_values.",
            stacklevel=4,
        )
    if compiling:
        return call_inner(module, state, args, kwargs)
    wanted = asked or (asked is None and getattr(getattr(module, "config", None), "use_cache", False))
    if wanted and state.known:
        _refuse_packed(state, args, kwargs)
    with only_own_caches(state.known):
        output = call_inner(module, state, args, kwargs)
    if wanted:
        _say_dropped(output)
    return output


def _refuse_packed(state: CacheState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConflictError for packed sequences by their positions alone, which transformers keeps apart without a cache
    and not with one (``masking_utils.find_packed_sequence_indices``)."""
    given = {name: kwargs.get(name, args[at] if at < len(args) else None) for name, at in state.packing.items()}
    positions = given.get("position_ids")
    if positions is None or positions.dim() != 2 or given.get("attention_mask") is not None:
        return
    if bool((positions.diff(dim=-1) == 1).all()):
        return
    raise ConflictError(
        "the model is given packed sequences (position_ids that begin anew, no attention_mask) with use_cache on, as "
        "is its default: there each sequence sees those before it, and a plan, which switches the cache off, would "
        "keep them apart",
        remedy="Pass use_cache=False to the model, without a plan too: packed sequences are then kept apart. Or pass "
        "an attention_mask.",
    )


def _say_dropped(output: Any) -> None:
    """Past the output's own ``__setattr__``, which would move what comes behind it in the tuple."""
    name = _RENAMED if _RENAMED in getattr(output, "__dataclass_fields__", ()) else "past_key_values"
    if getattr(output, name, output) is None:
        with contextlib.suppress(AttributeError):  # a class without room for it
            object.__setattr__(output, name, DROPPED)


def cache_owners(model: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules around attached units whose forward takes a library's ``use_cache``, whichever of them is called;
    units themselves do not count. What classes of somebody's own mean by that name is theirs to know."""
    attached = {id(unit) for unit in units}
    takers = (m for m in model.modules() if id(m) not in attached and _takes_use_cache(type(m)))
    return [taker for taker in takers if any(id(inner) in attached for inner in taker.modules())]


def _takes_use_cache(cls: type[nn.Module]) -> bool:
    of_a_library = any(is_library(owner) and not owner.__module__.startswith("torch.") for owner in cls.__mro__)
    return of_a_library and "use_cache" in parameter_names(cls)
