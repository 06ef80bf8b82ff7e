"""What must be looked after for the model as a whole while choices are attached to its units."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.interpreter import with_room
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import ForwardListener, is_library
from autockpt.policies.conflicts import refuse_native, with_switches
from autockpt.policies.kv_cache import DROPPED, holds_cache, parameter_names

_RENAMED = "cache"  # past_key_values since transformers 5.24
# what models call a cache, also one that is a tuple of tensors or an object of their own
_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "cache_params", _RENAMED)


class GuardState(Attachment):
    """The root's attachment: who wants to know about forward passes, and which switches must stay off.

    ``planned`` are the largest batch size and sequence length that the plan's promise covers, where known (or None).
    ``sets`` are the several sets of choices of which one acts in each forward (``choice_sets.BatchSets``).
    """

    def __init__(self, root: nn.Module, listeners: list[ForwardListener]) -> None:
        super().__init__("")
        self.listeners = listeners
        self.planned: tuple[int | None, ...] = ()
        self.sets: Any = None
        self._cache_switches: list[tuple[str, nn.Module]] | None = with_switches(root)

    def switches(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        """Modules with a switch of their own for activation checkpointing. A copy of the model looks for its own."""
        if self._cache_switches is None:
            self._cache_switches = with_switches(root)
        return self._cache_switches


def run_guarded(module: nn.Module, state: GuardState, /, *args: Any, **kwargs: Any) -> Any:
    """The whole model's forward. Raises ConflictError where a trainer switched on checkpointing of its own since."""
    if not state.active or not torch.is_grad_enabled():
        return call_inner(module, state, args, kwargs)
    for path, inner in state.switches(module):
        refuse_native(inner, path)
    if state.planned:
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
    first = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim() > 0), None)
    pairs = [] if first is None else [(n, most) for n, most in zip(first.shape, state.planned, strict=False) if most]
    if any(n > most for n, most in pairs):
        state.planned = ()
        here, planned = (" × ".join(map(str, sizes)) for sizes in zip(*pairs, strict=True))
        warnings.warn(
            f"a batch of {here} is larger than the plan was made for ({planned}): its promise about memory no longer "
            "holds. Search again with the larger shape.",
            stacklevel=4,
        )


class CacheState(Attachment):
    """The attachment that keeps a language model from building a KV cache in training steps.

    ``places`` are those of arguments among the forward's parameters: asked once, as a compiler cannot.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("")
        self.places = {name: place for place, name in enumerate(parameter_names(type(module)))}

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward is given by this name; None where it is not."""
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name)


def run_without_cache(module: nn.Module, state: CacheState, /, *args: Any, **kwargs: Any) -> Any:
    """The model's forward with ``use_cache`` off wherever gradients are enabled. The config stays as it is.

    With a cache that it is given all is as the caller wants it: somebody reads it. Where there would be one in the
    output, something stands in its place that tells whoever uses it.
    """
    if not state.active or not torch.is_grad_enabled():
        return call_inner(module, state, args, kwargs)
    compiling = torch.compiler.is_compiling()
    given = any([state.argument(name, args, kwargs) is not None for name in _CACHES])
    if not compiling:
        given = any([holds_cache(value) for value in (*args, *kwargs.values())]) or given
    if given:
        return call_inner(module, state, args, kwargs)
    asked, place = state.argument("use_cache", args, kwargs), state.places["use_cache"]
    if place < len(args):
        args = (*args[:place], False, *args[place + 1 :])
    else:
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
    if wanted:
        _refuse_packed(state, args, kwargs)
    output = call_inner(module, state, args, kwargs)
    if wanted:
        _say_dropped(output)
    return output


def _refuse_packed(state: CacheState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConflictError for packed sequences by their positions alone, which transformers keeps apart without a cache
    and not with one (``masking_utils.find_packed_sequence_indices``)."""
    positions, mask = (state.argument(name, args, kwargs) for name in ("position_ids", "attention_mask"))
    if positions is None or positions.dim() != 2 or mask is not None or bool((positions.diff(dim=-1) == 1).all()):
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
