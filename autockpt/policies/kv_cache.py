"""KV caches in a training step. A layer that is run again would add its keys and values to one twice.

Nobody reads the cache that a model makes for its own forward: those with a switch for it have it switched off as a
whole, and where one arrives at a layer nevertheless, as XLM's and FlauBERT's always do, each run of the layer gets an
empty one of its own. With none at all the layer would compute with another memory layout, and its last bits would
differ from plain training.

A cache from outside of the model is another matter: the next forward reads what this one adds (training in chunks), or
it holds what is trained (prefix tuning). The first run of a layer gets that very cache, every later run a copy of what
it was.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.policies.base import setting

# what layers and models call a cache that is a tuple of tensors, or an object of the model's own
CACHE_NAMES = frozenset({"past_key_values", "past_key_value", "layer_past", "past", "cache_params"})

# caches, and entries of them, that hold all they know in attributes and put other tensors in place of those they had
_COPYABLE = frozenset({"DynamicCache", "EncoderDecoderCache", "DynamicLayer", "DynamicSlidingWindowLayer"})
_NO_CACHE = frozenset((type(None), bool, int, float, str, torch.Tensor))
_here = threading.local()


def only_own_caches(only: bool) -> AbstractContextManager[None]:
    """Inside a cache that arrives at a layer is (``only``) one that nobody reads after this forward, or may be read."""
    return setting(_here, "only_own", only)


class StandIn:
    """Stands among the arguments for a cache. The first run gets ``given``, where there is one, every later run, and
    the first where there is none, its own copy of what ``cache`` is now."""

    def __init__(self, cache: Any, given: Any = None) -> None:
        self._before, self._given = _twin(cache), given
        # in sight, so that they are looked after like all tensors among the arguments
        self.tensors = list(_tensors_in(self._before)) if given is not None else []

    def cache(self) -> Any:
        # let go of: the cache will hold what the layer computes, and the layer's graph holds this
        given, self._given = self._given, None
        return _twin(self._before) if given is None else given


class _Dropped(ConflictError, AttributeError):
    """An AttributeError too: one may ask whether the cache has this or that."""


class DroppedCache:
    """Stands in a model's output for the cache that would be there in plain training. Whoever uses it is told."""

    def refuse(self, *_: Any) -> NoReturn:
        raise _Dropped(
            "past_key_values of an earlier forward is used, which kept no KV cache: use_cache is switched off while "
            "gradients are enabled and an autockpt plan is applied",
            remedy="To train in chunks, hand in a cache from the first one on: past_key_values=DynamicCache().",
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = refuse

    def __bool__(self) -> bool:
        return True


DROPPED = DroppedCache()


def holds_cache(value: Any) -> bool:
    """Whether a model is given a KV cache of transformers by this. Raises ConflictError for one that was dropped."""
    if type(value) is DroppedCache:
        value.refuse()
    return isinstance(value, _cache_type())


def with_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one run: what ``without_cache`` returned, each stand-in exchanged for its cache."""

    def filled(value: Any) -> Any:
        return value.cache() if type(value) is StandIn else value

    return tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()}


def without_cache(
    module: nn.Module, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, twice: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's call with a ``StandIn`` for each KV cache of transformers.

    Inside of a model that was given no cache a cache is left out altogether where it cannot be stood in for, and
    ``use_cache`` is off; layers that only read the cache (transformers marks them) keep it. Raises ConflictError where
    it holds something for this layer nevertheless: leaving that out would change the result. Raises it, too, for a
    cache from outside that cannot be copied, where the layer is going to run ``twice``; else nothing is done about it.
    """
    own = getattr(_here, "only_own", False)
    if getattr(type(module), "_can_checkpoint_with_cache", False) if own else not twice:
        return args, kwargs
    cache_type = _cache_type()

    def exchanged(name: str, value: Any) -> Any:
        if value is None or isinstance(value, torch.Tensor):
            return value
        if not own:
            return _kept(value, unit) if isinstance(value, cache_type) else value
        return _emptied(value, module, unit) if isinstance(value, cache_type) or name in CACHE_NAMES else value

    if any(isinstance(a, (tuple, list, cache_type)) for a in args):
        names = (*parameter_names(type(module)), *[""] * len(args))  # those that `*args` takes have none
        args = tuple(map(exchanged, names, args))
    others = [item for item in kwargs.items() if type(item[1]) not in _NO_CACHE]
    changes = {name: new for name, value in others if (new := exchanged(name, value)) is not value}
    if own and kwargs.get("use_cache"):
        changes["use_cache"] = False
    return args, ({**kwargs, **changes} if changes else kwargs)


def _cache_type() -> Any:
    """transformers' base of all caches, without importing transformers for models that do not use it: no type then."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())


@functools.lru_cache(maxsize=256)
def parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Those of a class's forward behind ``self``; none where it cannot be asked, as of TorchScript's."""
    try:
        return tuple(inspect.signature(cls.forward).parameters)[1:]
    except (AttributeError, TypeError, ValueError):
        return ()


def _kept(cache: Any, unit: str) -> StandIn:
    """What comes in the place of a cache that others read, too."""
    if not _can_be_copied(cache):
        raise ConflictError(
            f"{unit} was called with a KV cache ({type(cache).__name__}) that comes from outside of the model or is to "
            "be read outside of it, and that cannot be put back when the unit runs again",
            remedy="Hand in a DynamicCache that is not offloaded, or use `save` or `offload` on this unit.",
        )
    return StandIn(cache, cache)


def _can_be_copied(cache: Any) -> bool:
    if type(cache).__name__ not in _COPYABLE or type(cache).__module__ != _cache_type().__module__:
        return False
    if parts := [part for part in vars(cache).values() if isinstance(part, _cache_type())]:
        return all(map(_can_be_copied, parts))
    return not cache.offloading and all(type(entry).__name__ in _COPYABLE for entry in cache.layers)


def _tensors_in(cache: Any) -> Iterator[torch.Tensor]:
    for part in vars(cache).values():
        if isinstance(part, _cache_type()):
            yield from _tensors_in(part)
    for entry in getattr(cache, "layers", ()):
        yield from (value for value in vars(entry).values() if isinstance(value, torch.Tensor))


def _emptied(cache: Any, module: nn.Module, unit: str) -> StandIn | None:
    """What comes in the cache's place, once it is sure that it holds nothing for this layer."""
    # where a layer's part is, by the name that transformers' attentions give it (XLM: the second)
    indices = (getattr(inner, name, None) for name in ("layer_idx", "layer_id") for inner in module.modules())
    layer = next((index for index in indices if isinstance(index, int)), None)
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
