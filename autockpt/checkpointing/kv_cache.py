"""KV caches in a training step. A layer that is run again would add its keys and values to one twice.

A cache that a model makes for its own forward is never read: models with a switch for it have it switched off. A cache
that arrives at a layer nevertheless was passed to the model, and the next forward reads what this one adds (training in
chunks), or it holds what is trained (prefix tuning); or it is the model's own without a switch, as XLM's. The forward
of a layer gets that very cache, every recomputation a copy of what it was (``arguments.flatten``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NoReturn

import torch
from torch import nn

from autockpt.errors import ConflictError

# caches, and entries of them, that hold all they know in attributes and put other tensors in place of those they had
_COPYABLE = frozenset({"DynamicCache", "EncoderDecoderCache", "DynamicLayer", "DynamicSlidingWindowLayer"})


class CannotBeCopied(RuntimeError):
    """A cache holds more than its attributes say."""


class _Dropped(ConflictError, AttributeError):
    """An AttributeError too: one may ask whether the cache has this or that."""


class DroppedCache:
    """Stands in a model's output for the cache that would be there in plain training. Any use raises an error."""

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
    return isinstance(value, cache_type())


def cache_type() -> Any:
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
    inner = [part for part in vars(cache).values() if isinstance(part, cache_type())]
    return [cache, *(part for each in inner for part in _parts(each)), *([] if inner else cache.layers)]


def tensors_in(cache: Any) -> list[torch.Tensor]:
    """The tensors that a cache holds. Raises CannotBeCopied: see ``_COPYABLE``."""
    module, parts = cache_type().__module__, _parts(cache)
    for part in parts:
        known = type(part).__name__ in _COPYABLE and type(part).__module__ == module
        if not known or getattr(part, "offloading", False):
            raise CannotBeCopied(f"a KV cache ({type(cache).__name__}) that cannot be copied")
    return [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
