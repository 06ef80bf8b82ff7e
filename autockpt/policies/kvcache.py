"""The KV cache has no place in a training step: a layer that is run again would add its keys and values twice.

Models with a switch for it have it switched off as a whole. Where one arrives at a layer nevertheless, as XLM's and
FlauBERT's always do, each run of the layer gets an empty one of its own: with none at all the layer would compute with
another memory layout, and its last bits would differ from plain training.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from typing import Any

import torch
from torch import nn

from autockpt.errors import ConflictError

# what layers call a cache that is a tuple of tensors, or an object of the model's own
_CACHE_NAMES = frozenset({"past_key_values", "past_key_value", "layer_past", "past", "cache_params"})


# entries of a cache that start over from nothing, and take nothing over from what they are copied from
_COPYABLE = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})


class StandIn:
    """Stands among the arguments for a cache that is empty where the layer will look. Every run gets one of its own."""

    def __init__(self, cache: Any) -> None:
        self._empty = _twin(cache)

    def cache(self) -> Any:
        return _twin(self._empty)


def with_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one run: what ``without_cache`` returned, each stand-in exchanged for a new empty cache."""

    def filled(value: Any) -> Any:
        return value.cache() if type(value) is StandIn else value

    return tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()}


def without_cache(
    module: nn.Module, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's call with its KV cache taken out and ``use_cache`` off.

    In place of a growing cache of transformers there is a ``StandIn`` then, else None. Layers that only read the cache
    (transformers marks them) keep it. Raises ConflictError where the cache already holds something for this layer:
    leaving that out would change the result.
    """
    if getattr(type(module), "_can_checkpoint_with_cache", False):
        return args, kwargs
    cache_type = _cache_type()

    def emptied(name: str, value: Any) -> Any:
        if value is None or isinstance(value, torch.Tensor):
            return value
        return _emptied(value, module, unit) if isinstance(value, cache_type) or name in _CACHE_NAMES else value

    if any(isinstance(a, (tuple, list, cache_type)) for a in args):
        names = (*_parameter_names(type(module)), *[""] * len(args))  # those that `*args` takes have none
        args = tuple(map(emptied, names, args))
    changes = {name: new for name, value in kwargs.items() if (new := emptied(name, value)) is not value}
    if kwargs.get("use_cache"):
        changes["use_cache"] = False
    return args, ({**kwargs, **changes} if changes else kwargs)


def _cache_type() -> Any:
    """transformers' base of all caches, without importing transformers for models that do not use it: no type then."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())


@functools.lru_cache(maxsize=256)
def _parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _emptied(cache: Any, module: nn.Module, unit: str) -> StandIn | None:
    """What comes in the cache's place, once it is sure that it holds nothing for this layer."""
    layer = _layer_index(module)
    if _holds_something(cache, layer):
        raise ConflictError(
            f"{unit} was called with a KV cache that already holds keys and values, while gradients are enabled",
            remedy="Prefix tuning and training on top of a filled cache work with `save` on this unit only.",
        )
    return StandIn(cache) if _can_stand_in(cache, layer) else None


def _can_stand_in(cache: Any, layer: int | None) -> bool:
    """Whether a shallow copy of a cache grows by itself from here on."""
    cache_type = _cache_type()
    if not isinstance(cache, cache_type) or getattr(cache, "offloading", False):
        return False
    parts = [part for part in vars(cache).values() if isinstance(part, cache_type)]
    if parts:
        return all(_can_stand_in(part, layer) for part in parts)
    mine = cache.layers if layer is None else cache.layers[layer : layer + 1]
    return all(type(entry).__name__ in _COPYABLE and not entry.is_initialized for entry in mine)


def _twin(cache: Any) -> Any:
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            setattr(twin, name, [copy.copy(entry) for entry in value])
        elif name == "is_updated":
            setattr(twin, name, dict(value))
        elif name.endswith("_cache"):
            setattr(twin, name, _twin(value))
    return twin


def _layer_index(module: nn.Module) -> int | None:
    """Where a layer's part of a cache is, by the name that transformers' attentions give it (XLM: the second)."""
    names = "layer_idx", "layer_id"
    indices = (getattr(inner, name, None) for name in names for inner in module.modules())
    return next((index for index in indices if isinstance(index, int)), None)


def _holds_something(cache: Any, layer: int | None) -> bool:
    if isinstance(cache, (tuple, list)):
        return any(_holds_something(part, layer) for part in cache)
    if isinstance(cache, torch.Tensor):
        return cache.numel() > 0
    names = "self_attention_cache", "cross_attention_cache"
    if parts := [part for name in names if (part := getattr(cache, name, None)) is not None]:
        return any(_holds_something(part, layer) for part in parts)
    layers = getattr(cache, "layers", None)
    if layers is None:
        return cache is not None
    mine = layers if layer is None else layers[layer : layer + 1]
    return any(_layer_holds_something(entry) for entry in mine)


def _layer_holds_something(entry: Any) -> bool:
    """Whether keys, or a recurrent layer's states, were written to a cache's layer."""
    if isinstance(entry, (tuple, list)):
        return _holds_something(entry, None)
    flags = [vars(entry).get(name) for name in ("is_conv_states_initialized", "has_previous_state")]
    if any(any(flag.values()) if isinstance(flag, dict) else bool(flag) for flag in flags):
        return True
    if not getattr(entry, "is_initialized", True):
        return False
    length = getattr(entry, "get_seq_length", None)
    if length is not None:
        return int(length()) > 0
    return any(isinstance(v, torch.Tensor) and v.numel() > 0 for v in vars(entry).values())
