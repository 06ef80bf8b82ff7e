"""Autocast as it was in a forward, for a recomputation.

Autocast remembers its casts of weights until its outermost block ends. A recomputation uses none of these and leaves
none: it may run in another block than its forward, or after an update of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]


class AutocastState:
    """To which types autocast casts on these kinds of devices, when this was made."""

    __slots__ = ("_kinds", "_then")

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds if len(kinds) == 1 else [k for k in kinds if torch.amp.is_autocast_available(k)]
        self._then = self._now()

    @property
    def enabled(self) -> bool:
        """Whether autocast was on."""
        return any(enabled for _, enabled, _ in self._then[1])

    @property
    def key(self) -> tuple[Any, ...] | None:
        """To which types it casted; None where it was off."""
        return (self._then[0], *self._then[1]) if self.enabled else None

    def _now(self) -> tuple[bool, list[tuple[str, bool, torch.dtype]]]:
        states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return torch.is_autocast_cache_enabled(), states

    @contextmanager
    def restored(self, *, remembers: bool = False) -> Iterator[None]:
        """As then, and afterwards as now. ``remembers``: a weight that is used several times is cast once.

        A forward may enter autocast by hand (``__enter__``), and a recomputation that stops early misses the exit.
        """
        now, depth = self._now(), autocast_depth()
        cache, states = self._then
        # a unit's own block inside of no other remembers nothing beyond its end
        wanted = cache and (remembers or (depth == 0 and not self.enabled)), states
        try:
            if wanted != now:
                _put_autocast(*wanted)
            yield
        finally:
            if (now, depth) != (self._now(), autocast_depth()):
                _put_autocast(*now)
                for _ in range(autocast_depth(), depth):
                    torch.autocast_increment_nesting()
                for _ in range(depth, autocast_depth()):
                    torch.autocast_decrement_nesting()
                if depth == 0 and wanted[0]:  # as at the end of the outermost block
                    torch.clear_autocast_cache()


def _put_autocast(cache: bool, states: Sequence[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)


def autocast_depth() -> int:
    """How many blocks of autocast are around this."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
