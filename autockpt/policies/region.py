"""Calls of several units whose saved tensors are made again together.

Every call runs in its normal place. Of its inputs it keeps those that come from outside; of those that another call of
the same region returned it only knows which output of which call they are. What autograd saves is replaced by empty
slots. Backward fills them by running calls again, each under its own random state, autocast and buffers.

Ownership: an autograd graph holds slots, a slot its call, a call the earlier calls whose outputs it reads. So a part of
the region lives as long as some graph needs it, whatever happens to the rest, and nothing is held in a circle.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.errors import ConflictError
from autockpt.policies.arguments import take_apart
from autockpt.policies.conditions import Conditions, random_states_kept
from autockpt.policies.replay import Replay
from autockpt.policies.saved import Kept, Watched

_Layout = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


class _Enough(Exception):
    """All slots are filled. Like torch's own no BaseException: modules run hooks at exceptions of this kind only."""


class Slot:
    """Stands in an autograd graph for a saved tensor. ``value`` is there between its making and its use."""

    __slots__ = ("__weakref__", "call", "form", "value")

    def __init__(self, call: Call, tensor: torch.Tensor) -> None:
        self.call = call
        self.form = (tensor.size(), tensor.dtype, tensor.device)
        self.value: torch.Tensor | None = None


def unpack(slot: Slot) -> torch.Tensor:
    """The hook for autograd's unpacking. A value that was used up, as in a second backward, is made once more."""
    if slot.value is None:
        slot.call.refill()
    value, slot.value = slot.value, None
    if value is None:
        raise slot.call.differs("did not save a tensor again that it saved in forward")
    return value


class _Outside:
    """An input that no call of this region has returned. Kept."""

    __slots__ = ("_kept", "_trains")

    def __init__(self, tensor: torch.Tensor, unit: str) -> None:
        self._kept, self._trains = Kept(tensor, unit), tensor.requires_grad

    def value(self) -> torch.Tensor:
        return _as_input(self._kept.unpack(), self._trains)


class _Inside:
    """An input that an earlier call returned as its ``leaf``-th tensor. Not kept."""

    __slots__ = ("_trains", "_watched", "call", "leaf")

    def __init__(self, call: Call, leaf: int, tensor: torch.Tensor, unit: str) -> None:
        self.call, self.leaf = call, leaf
        self._watched, self._trains = Watched(tensor, unit), tensor.requires_grad

    def value(self) -> torch.Tensor:
        """Raises InPlaceError where the tensor was changed in place since, as autograd itself would."""
        self._watched.check()
        return _as_input(self.call.outputs[self.leaf], self._trains)


def _as_input(value: torch.Tensor, trains: bool) -> torch.Tensor:
    return value.detach().requires_grad_() if trains else value


class Call:
    """One call of a unit: what it needs to run again, and the slots that wait for it.

    ``readers`` are the numbers of later calls that read an output; ``outputs`` holds those values, without a graph,
    only while backward is at work on the region.
    """

    def __init__(self, number: int, replay: Replay, levels: int, lock: threading.RLock) -> None:
        self.number, self.levels = number, levels
        self._replay, self._lock = replay, lock
        self._conditions = Conditions((*replay.tensors, *replay.parameters.tensors))
        self._sources: list[_Outside | _Inside] = []
        self._positions: list[int] = []
        self._slots: list[weakref.ref[Slot]] = []
        self.readers: dict[int, list[int]] = {}
        self.outputs: dict[int, torch.Tensor] = {}

    def bind(self, find: Callable[[torch.Tensor], tuple[Call, int] | None]) -> None:
        """Note where every input comes from. One that is given twice stays one: attention looks whether q is k."""
        unit = self._replay.state.unit
        seen: dict[int, int] = {}
        for tensor in self._replay.tensors:
            position = seen.setdefault(id(tensor), len(self._sources))
            self._positions.append(position)
            if position < len(self._sources):
                continue
            if (found := find(tensor)) is None:
                self._sources.append(_Outside(tensor, unit))
            else:
                call, leaf = found
                call.readers.setdefault(leaf, []).append(self.number)
                self._sources.append(_Inside(call, leaf, tensor, unit))

    def pack(self, tensor: torch.Tensor) -> Slot:
        """The hook for autograd's packing in the first forward."""
        slot = Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def refill(self) -> None:
        """Fill this call's slots; with one level, too, those of the earlier calls that must run for it anyway.

        Raises InPlaceError where something that a call read was changed since, ConflictError where a call does not do
        again what it did.
        """
        with self._lock:
            order = self._with_ancestors()
            places = sorted({place for call in order for place in call._conditions.places})
            try:
                with random_states_kept(places):
                    for call in order:
                        call._run_again(self, fill=call is self or (self.levels == 1 and call._waits()))
            except BaseException:
                for call in order:
                    call.outputs.clear()
                raise

    def _with_ancestors(self) -> list[Call]:
        """The calls that must run, in their order, this one last: those whose outputs are needed and not there."""
        found: dict[int, Call] = {}
        open_ends = [self]
        while open_ends:
            call = open_ends.pop()
            if call.number not in found:
                found[call.number] = call
                open_ends += [s.call for s in call._inside() if s.leaf not in s.call.outputs]
        return [found[number] for number in sorted(found)]

    def _inside(self) -> Iterator[_Inside]:
        return (source for source in self._sources if isinstance(source, _Inside))

    def _waits(self) -> bool:
        return any(slot.value is None for ref in self._slots if (slot := ref()) is not None)

    def _run_again(self, target: Call, fill: bool) -> None:
        """Run as in forward; ``target`` is the last call of this refill, which ends as soon as its slots are full."""
        filler = _Filler(self, self._slots, fill, stops=self is target)
        values = [source.value() for source in self._sources]
        tensors = [values[position] for position in self._positions]
        del values
        self._gather_parameters()
        try:
            # hooks in any case: backward may have been called inside a unit's forward, whose own are in force then
            with torch.enable_grad(), self._conditions.restored(), saved_tensors_hooks(filler.pack, _as_it_is):
                output = self._replay(*tensors)
        except _Enough:
            output = None
        if filler.seen < len(self._slots):
            raise self.differs(f"saved {len(self._slots)} tensors in forward and {filler.seen} when it ran again")
        self._keep_outputs(output, target.number)
        self._drop_inputs(target)

    def _keep_outputs(self, output: Any, until: int) -> None:
        wanted = [leaf for leaf, readers in self.readers.items() if min(readers) <= until and self.number < until]
        if wanted:
            tensors: list[torch.Tensor] = []
            take_apart(output, tensors, [])
            self.outputs |= {leaf: tensors[leaf].detach() for leaf in wanted}

    def _drop_inputs(self, target: Call) -> None:
        """Let go of the outputs of other calls that no call needs any more.

        With one level those are needed until the target has run; with two, until every reader before it has had its own
        turn, and backward takes them from the last to the first.
        """
        for source in self._inside():
            readers = source.call.readers[source.leaf]
            if self.levels == 1:
                needed = any(self.number < reader <= target.number for reader in readers)
            else:
                needed = self is not target or min(readers) < self.number
            if not needed:
                source.call.outputs.pop(source.leaf, None)

    def _gather_parameters(self) -> None:
        """Have FSDP2 gather this unit's parameters where it has them in pieces at present. Its own backward, or the end
        of this one, lets them go again. Raises ConflictError where they stay in pieces."""
        module, state = self._replay.module, self._replay.state
        before = self._replay.parameters.tensors
        if not any(map(_in_pieces, before, state.parameters(module))):
            return
        unshard: Any = getattr(module, "unshard", None)
        if unshard is not None:
            unshard()
        if any(map(_in_pieces, before, state.parameters(module))):
            raise ConflictError(
                f"the parameters of {state.unit} are sharded while its segment runs again in backward",
                remedy="Shard the segment's units one by one or together (fully_shard), or use recompute for them.",
            )

    def differs(self, what: str) -> ConflictError:
        """The error for a unit that is not repeatable."""
        return ConflictError(
            f"{self._replay.state.unit} {what}: it does not do the same twice",
            remedy="Use `save` or `offload` for it; something that it reads has changed between forward and backward.",
        )


def _in_pieces(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    return before is not now and hasattr(now, "to_local") and not hasattr(before, "to_local")


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Filler:
    """Puts what a second run saves into the slots of the first, or only looks whether it would fit. ``seen`` counts."""

    def __init__(self, call: Call, slots: list[weakref.ref[Slot]], fills: bool, stops: bool) -> None:
        self._call, self._slots, self._fills, self._stops = call, slots, fills, stops
        self.seen = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook for autograd's packing when a call runs again."""
        if self.seen >= len(self._slots):
            raise self._call.differs(f"saved {len(self._slots)} tensors in forward and more when it ran again")
        # a graph that holds its own output by way of Python is never freed
        value = tensor.detach() if tensor.requires_grad else tensor
        slot = self._slots[self.seen]()
        self.seen += 1
        if slot is not None:
            form = (value.size(), value.dtype, value.device)
            if slot.form != form:
                was, now = (f"{tuple(size)} {dtype} on {device}" for size, dtype, device in (slot.form, form))
                raise self._call.differs(f"saved a tensor {was} in forward and {now} when it ran again")
            if self._fills and slot.value is None:
                slot.value = value
        if self._stops and self.seen == len(self._slots):
            raise _Enough
        return value


class Recording:
    """The calls of one pass through a region, so that each finds the outputs of those before it.

    An output is known again by its storage, layout and version, not by its Python object: hooks of modules hand on new
    tensors over the same memory. A storage's Python object lives as long as the storage, so an address whose storage
    was freed and given to another is not mistaken.
    """

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._lock = threading.RLock()
        self._calls = 0
        self._known: dict[_Layout, tuple[weakref.ref[torch.UntypedStorage], int, Call, int]] = {}

    def add(self, replay: Replay) -> Call:
        """A call begins; before its forward."""
        call = Call(self._calls, replay, self._levels, self._lock)
        self._calls += 1
        call.bind(self._find)
        return call

    def learn(self, call: Call, output: Any) -> None:
        """The call has returned."""
        tensors: list[torch.Tensor] = []
        take_apart(output, tensors, [])
        for leaf, tensor in enumerate(tensors):
            if (layout := _layout(tensor)) is not None:
                self._known[layout] = (weakref.ref(tensor.untyped_storage()), tensor._version, call, leaf)

    def _find(self, tensor: torch.Tensor) -> tuple[Call, int] | None:
        layout = _layout(tensor) if self._known else None
        if layout is None or (known := self._known.get(layout)) is None:
            return None
        storage, version, call, leaf = known
        return (call, leaf) if storage() is not None and tensor._version == version else None


def _layout(tensor: torch.Tensor) -> _Layout | None:
    """What tells a plain tensor from every other that is alive; None for other kinds, which are simply kept."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    address = tensor.untyped_storage()._cdata
    return address, int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype
