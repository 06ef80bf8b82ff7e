"""Buffers that a forward changes (BatchNorm's running statistics, spectral norm's vectors): running it again must not.

A recompute runs on copies of what such buffers held before the forward, so it sees what the forward saw and its own
changes are thrown away. Which buffers change is known for BatchNorm and its kin and found out on the first calls for
all others; autograd's version counters catch those that begin to change later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autockpt.errors import ConflictError
from autockpt.policies.base import InPlaceError

_FIRST_CALLS = 2


class Seen(NamedTuple):
    """A buffer as one forward met it.

    ``place`` is the path of the owning module inside the unit, and the buffer's name. ``tensor`` is None for a buffer
    that the forward itself made; ``registered``: there was room for it before. ``before`` is a copy from before the
    forward, for those it changes in place.
    """

    owner: nn.Module
    place: tuple[str, str]
    tensor: torch.Tensor | None
    version: int = 0
    before: torch.Tensor | None = None
    registered: bool = True


class _Places:
    """Where a module has buffers, and where it has room for one (``empty``)."""

    def __init__(self, module: nn.Module) -> None:
        found = list(_places(module))
        self.found = [(owner, place) for owner, place in found if owner._buffers[place[1]] is not None]
        self.empty = [(owner, place) for owner, place in found if owner._buffers[place[1]] is None]
        self._fields = [inner._buffers for inner in module.modules()]
        self._sizes = self._now()

    def still_are(self) -> bool:
        """Whether there are no others: how many each module has tells."""
        return self._now() == self._sizes and all(owner._buffers.get(place[1]) is None for owner, place in self.empty)

    def _now(self) -> list[int]:
        return list(map(len, self._fields))


class BufferWatch:
    """What is known about the buffers of one unit, from call to call. Copied and pickled with the unit."""

    def __init__(self) -> None:
        self._changing: set[tuple[str, str]] = set()
        self._calls = {True: 0, False: 0}  # by the unit's `training`: dropout and statistics differ
        self._cache_places: _Places | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cache_places": None}

    def before(self, module: nn.Module) -> list[Seen]:
        """Look at the buffers before a forward; copy those that change, and all of them on the first calls."""
        first = self._is_first(module)
        if self._cache_places is None or first or not self._cache_places.still_are():
            self._cache_places = _Places(module)
        seen = []
        for owner, place in self._cache_places.found:
            if (tensor := owner._buffers.get(place[1])) is not None:
                copied = tensor.detach().clone() if first or self._changes(owner, place) else None
                seen.append(Seen(owner, place, tensor, tensor._version, copied))
        return seen

    def after(self, module: nn.Module, unit: str, seen: list[Seen]) -> list[Seen]:
        """The same entries after the forward, with the copies that a recompute needs and no others.

        Raises ConflictError where a buffer was changed in place of which no copy was made.
        """
        first = self._is_first(module)
        self._calls[module.training] += 1
        values_count = first and not _get_current_dispatch_mode_stack()  # under a mode tensors may be without values
        kept = []
        for entry in seen:
            if _changed_in_place(entry, values_count):
                if entry.before is None:
                    raise ConflictError(
                        f"{_name(unit, entry.place)} is a buffer that this forward changed and earlier ones did not",
                        remedy=f"Use `save` or `offload` on {unit}: recompute would change the buffer twice.",
                    )
                self._changing.add(entry.place)
            kept.append(entry if self._changes(entry.owner, entry.place) else entry._replace(before=None))
        return kept + self._made(module, seen)

    def so_far(self, module: nn.Module, seen: list[Seen]) -> list[Seen]:
        """The same in the middle of the forward, with those that it made itself."""
        return seen + self._made(module, seen)

    def _made(self, module: nn.Module, seen: list[Seen]) -> list[Seen]:
        """Those that the forward made."""
        places = self._cache_places
        if places is None or places.still_are():
            return []
        known, empty = {entry.place for entry in seen}, {place for _, place in places.empty}
        return [
            Seen(owner, place, None, registered=place in empty)
            for owner, place in _places(module)
            if place not in known and owner._buffers[place[1]] is not None
        ]

    def _is_first(self, module: nn.Module) -> bool:
        return self._calls[module.training] < _FIRST_CALLS

    def _changes(self, owner: nn.Module, place: tuple[str, str]) -> bool:
        # BatchNorm's kernels change the statistics without telling autograd
        return place in self._changing or (isinstance(owner, _NormBase) and owner.track_running_stats)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    for path, owner in module.named_modules():
        for name in owner._buffers:
            yield owner, (path, name)


def _name(unit: str, place: tuple[str, str]) -> str:
    return ".".join(filter(None, (unit, *place)))


def _changed_in_place(entry: Seen, compare_values: bool) -> bool:
    """A buffer that was replaced is not changed: its entry holds on to what the forward read."""
    if entry.tensor is None:
        return False
    if entry.tensor._version != entry.version:
        return True
    return compare_values and entry.before is not None and not torch.equal(entry.tensor, entry.before)


@contextmanager
def as_seen(unit: str, seen: list[Seen]) -> Iterator[None]:
    """Give the modules the buffers that the forward met, and what they hold now back afterwards.

    Raises InPlaceError where a buffer of which no copy exists was changed since.
    """
    held = [entry.owner._buffers.get(entry.place[1]) for entry in seen]
    try:
        for owner, place, tensor, version, before, registered in seen:
            if tensor is None:
                if registered:
                    owner._buffers[place[1]] = None
                else:
                    owner._buffers.pop(place[1], None)
                continue
            if before is None and tensor._version != version:
                raise InPlaceError(
                    f"the buffer {_name(unit, place)} was changed in place between forward and backward",
                    remedy=f"Change it after backward, or use `save` on {unit}.",
                )
            owner._buffers[place[1]] = tensor if before is None else before.clone()
        yield
    finally:
        for entry, tensor in zip(seen, held, strict=True):
            entry.owner._buffers[entry.place[1]] = tensor
