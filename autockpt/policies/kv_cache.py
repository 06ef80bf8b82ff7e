"""KV caches in a training step. A layer that is run again would add its keys and values to one twice.

Nobody reads the cache that a model makes for its own forward: those with a switch for it have it switched off as a
whole. A cache that arrives at a layer nevertheless is one that the model was given, and the next forward reads what
this one adds (training in chunks), or it holds what is trained (prefix tuning); or it is the model's own without a
switch, as XLM's. The first run of a layer gets that very cache, every later run a copy of what it was.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from typing import Any, NoReturn

import torch
from torch import nn

from autockpt.errors import ConflictError

# caches, and entries of them, that hold all they know in attributes and put other tensors in place of those they had
_COPYABLE = frozenset({"DynamicCache", "EncoderDecoderCache", "DynamicLayer", "DynamicSlidingWindowLayer"})


class StandIn:
    """Stands among the arguments for a cache. The first run gets the cache, every later run a copy of what it is now.

    Raises ConflictError for one that cannot be copied.
    """

    def __init__(self, cache: Any, unit: str) -> None:
        if not _can_be_copied(cache):
            raise ConflictError(
                f"{unit} was called with a KV cache ({type(cache).__name__}) of which it cannot be given a copy again",
                remedy="Hand in a DynamicCache that is not offloaded, or use `save` or `offload` on this unit.",
            )
        self._before, self._given = _twin(cache), cache
        self.tensors = _tensors_in(self._before)  # in sight, so that they are looked after like all arguments

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
    """Whether this is a KV cache of transformers. Raises ConflictError for one that was dropped."""
    if type(value) is DroppedCache:
        value.refuse()
    return isinstance(value, _cache_type())


def without_caches(
    unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a layer's call with a ``StandIn`` for each KV cache of transformers; None where it has none."""
    if "transformers.cache_utils" not in sys.modules:
        return None
    caches = sys.modules["transformers.cache_utils"].Cache
    for value in (*args, *kwargs.values()):
        if isinstance(value, caches):
            break
    else:
        return None

    def exchanged(value: Any) -> Any:
        return StandIn(value, unit) if isinstance(value, caches) else value

    return tuple(map(exchanged, args)), {name: exchanged(value) for name, value in kwargs.items()}


def with_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one run: each stand-in exchanged for its cache."""

    def filled(value: Any) -> Any:
        return value.cache() if type(value) is StandIn else value

    return tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()}


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


def _parts(cache: Any) -> list[Any]:
    """A cache and what it consists of: its layers, or the caches in it with theirs."""
    inner = [part for part in vars(cache).values() if isinstance(part, _cache_type())]
    return [cache, *(part for each in inner for part in _parts(each)), *([] if inner else cache.layers)]


def _can_be_copied(cache: Any) -> bool:
    module = _cache_type().__module__
    return all(
        type(part).__name__ in _COPYABLE and type(part).__module__ == module and not getattr(part, "offloading", False)
        for part in _parts(cache)
    )


def _tensors_in(cache: Any) -> list[torch.Tensor]:
    return [value for part in _parts(cache) for value in vars(part).values() if isinstance(value, torch.Tensor)]


def _twin(cache: Any) -> Any:
    """A copy, of the same tensors."""
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in _tensors_in(cache)})
