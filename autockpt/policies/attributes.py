"""Plain attributes that a forward changes (counters, states carried to the next call, lists that it adds to, generators
of its own): running it again must find them as the forward did, and leave no trace in them.

On a unit's first calls all are looked at closely. Later that is too dear for most: of those that have not changed so
far it is only compared which objects they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.policies.base import InPlaceError
from autockpt.policies.mutable import copied, differ, is_mutable, tensors_in, without_graphs
from autockpt.policies.structure import is_sharded

_FIRST_CALLS = 2
_ABSENT = object()
_NOT_STATE = frozenset((*vars(nn.Module()), "forward"))


class Met(NamedTuple):
    """An attribute as one forward met it.

    ``place`` is the path of the owning module inside the unit, and the attribute's name. ``copied`` holds what was in
    ``value`` before the forward: the elements of a container, a generator's state; with ``clones`` the numbers of
    tensors too. For all else it is the value itself. ``tensors``: those in it, with their versions.
    """

    owner: nn.Module
    place: tuple[str, str]
    value: Any
    copied: Any
    clones: bool = False
    tensors: Sequence[tuple[torch.Tensor, int]] = ()


class _Others:
    """Attributes that no forward has changed so far and that change by being exchanged only: which objects they are is
    all that is looked at. The number of all attributes of each module tells of new ones."""

    def __init__(self, module: nn.Module, places: list[tuple[nn.Module, tuple[str, str]]]) -> None:
        self.places = places
        self._fields = [(vars(owner), place[1]) for owner, place in places]
        self._all = [vars(inner) for inner in module.modules()]
        self._kinds, self._counted = list(map(type, self.values())), self.sizes()

    def values(self) -> list[Any]:
        return [fields.get(name, _ABSENT) for fields, name in self._fields]

    def sizes(self) -> list[int]:
        return list(map(len, self._all))

    def still_are(self, values: list[Any], sizes: list[int]) -> bool:
        """Whether these are values and sizes of the same attributes, of the same kinds."""
        return sizes == self._counted and list(map(type, values)) == self._kinds

    def changed(self, values: list[Any]) -> list[Met]:
        """Those that held ``values`` and are others now."""
        now = self.values()
        if all(map(operator.is_, values, now)):
            return []
        return [
            Met(owner, place, before, before)
            for (owner, place), before, after in zip(self.places, values, now, strict=True)
            if before is not after
        ]


class Look(NamedTuple):
    """A unit's attributes before a forward: ``met`` closely, the ``values`` of ``others`` by the way, none of these on
    the first calls."""

    met: list[Met]
    others: _Others | None
    values: list[Any]
    sizes: list[int]


class AttributeWatch:
    """What is known about the attributes of one unit, from call to call. Copied and pickled with the unit."""

    def __init__(self) -> None:
        self._changing: set[tuple[str, str]] = set()
        self._written: set[tuple[str, str]] = set()  # whose tensors change in place
        self._calls = {True: 0, False: 0}  # by the unit's `training`
        self._cache_places: tuple[list[tuple[nn.Module, tuple[str, str]]], _Others] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cache_places": None}

    def before(self, module: nn.Module) -> Look:
        """Look at the attributes before a forward: closely at all of them on the first calls, then at those that change
        or could without being exchanged."""
        if self._is_first(module):
            self._cache_places = None
            return Look([_met(owner, place, clones=True) for owner, place in _places(module)], None, [], [])
        closely, others = self._cache_places or self._sorted(module)
        values, sizes = others.values(), others.sizes()
        if not others.still_are(values, sizes):
            closely, others = self._sorted(module)
            values, sizes = others.values(), others.sizes()
        self._cache_places = closely, others
        met = [_met(owner, place, clones=place in self._written) for owner, place in closely]
        return Look(met, others, values, sizes)

    def _sorted(self, module: nn.Module) -> tuple[list[tuple[nn.Module, tuple[str, str]]], _Others]:
        """The places to look at closely, and all others."""
        owners = dict(module.named_modules())
        closely = [(owners[place[0]], place) for place in sorted(self._changing) if place[0] in owners]
        others: list[tuple[nn.Module, tuple[str, str]]] = []
        for owner, place in _places(module):
            if place not in self._changing:
                (closely if is_mutable(vars(owner)[place[1]]) else others).append((owner, place))
        return closely, _Others(module, others)

    def after(self, module: nn.Module, unit: str, look: Look) -> list[Met]:
        """What changes, as it was before the forward that has ended now, and nothing that holds a graph.

        Raises ConflictError where a tensor was changed in place of which no copy was made.
        """
        met, first = self.so_far(module, look), self._is_first(module)
        if first:
            self._calls[module.training] += 1
        for entry in met:
            written = _written(entry)
            if entry.place not in self._changing:
                if not written and not _exchanged(entry):
                    continue
                self._changing.add(entry.place)
                self._cache_places = None
            if written and entry.place not in self._written:
                self._written.add(entry.place)
                if not first:
                    raise ConflictError(
                        f"{_name(unit, entry)} {_is_or_holds(entry)} a tensor that this forward changed in place and "
                        "earlier ones did not, so this once it cannot run again",
                        remedy="Run the step again: from now on a copy is kept for it.",
                    )
        return [self._kept(entry) for entry in met if entry.place in self._changing]

    def so_far(self, module: nn.Module, look: Look) -> list[Met]:
        """What could have changed up to the middle of the forward, and what it made itself."""
        met, others = look.met, look.others
        if others is not None:
            met = met + others.changed(look.values)
            if others.sizes() == look.sizes:
                return met
        known = {entry.place for entry in met} | {place for _, place in (others.places if others is not None else ())}
        return met + [Met(owner, place, _ABSENT, _ABSENT) for owner, place in _places(module) if place not in known]

    def _is_first(self, module: nn.Module) -> bool:
        return self._calls[module.training] < _FIRST_CALLS

    def _kept(self, entry: Met) -> Met:
        """What the second run needs, without graphs: of tensors that do not change in place no clones."""
        clones = entry.place in self._written
        if isinstance(entry.value, torch.Tensor):
            value = without_graphs(entry.value)
            kept = entry.copied if clones else value
        else:
            value, kept, clones = None, without_graphs(entry.copied), entry.clones
        uncloned = [(t, version) for t, version in entry.tensors if t.requires_grad or not clones]
        watched = [(without_graphs(tensor), version) for tensor, version in uncloned]
        return entry._replace(value=value, copied=kept, clones=clones, tensors=watched)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name not in _NOT_STATE and not (isinstance(value, torch.Tensor) and is_sharded(owner)):
                yield owner, (path, name)


def _met(owner: nn.Module, place: tuple[str, str], *, clones: bool) -> Met:
    value = vars(owner).get(place[1], _ABSENT)
    if not is_mutable(value):
        return Met(owner, place, value, value)
    tensors = [(tensor, tensor._version) for tensor in _with_versions(value)]
    return Met(owner, place, value, copied(value, clones=clones), clones, tensors)


def _with_versions(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(value) if not tensor.is_inference())


def _written(entry: Met) -> bool:
    return any(tensor._version != version for tensor, version in entry.tensors)


def _exchanged(entry: Met) -> bool:
    """Whether there is another object now, or the same in another state."""
    now = vars(entry.owner).get(entry.place[1], _ABSENT)
    if now is not entry.value:
        return True
    if not is_mutable(now) or isinstance(now, torch.Tensor):
        return False
    others = list(map(id, _with_versions(now))) != [id(tensor) for tensor, _ in entry.tensors]
    return others or differ(entry.copied, now)


@contextmanager
def as_met(unit: str, met: list[Met]) -> Iterator[None]:
    """Give the modules the attributes that the forward met, and what they hold now back afterwards.

    Raises InPlaceError where a tensor of which no copy exists was changed since.
    """
    held = [vars(entry.owner).get(entry.place[1], _ABSENT) for entry in met]
    try:
        for entry in met:
            _bind(entry, _again(unit, entry))
        yield
    finally:
        for entry, value in zip(met, held, strict=True):
            _bind(entry, value)


def _again(unit: str, entry: Met) -> Any:
    if _written(entry):
        where = _name(unit, entry) if isinstance(entry.copied, torch.Tensor) else f"in {_name(unit, entry)}"
        raise InPlaceError(
            f"the tensor {where} was changed in place between forward and backward",
            remedy=f"Change it after backward, or use `save` on {unit}.",
        )
    return copied(entry.copied, clones=entry.clones)


def _is_or_holds(entry: Met) -> str:
    return "is" if isinstance(entry.copied, torch.Tensor) else "holds"


def _name(unit: str, entry: Met) -> str:
    return ".".join(filter(None, (unit, *entry.place)))


def _bind(entry: Met, value: Any) -> None:
    fields = vars(entry.owner)
    if value is _ABSENT:
        fields.pop(entry.place[1], None)
    else:
        fields[entry.place[1]] = value
