"""Calls of units whose saved tensors are made again: of one unit by itself, or of several together.

Every call runs in its normal place. Of its inputs it keeps those that come from outside; of those that another call of
the same region returned it only knows which output of which call they are. What autograd saves is replaced by empty
slots. Backward fills them by running calls again, each under its own random state, autocast and buffers.

Not by way of ``torch.utils.checkpoint``: that knows no region of several calls, and looks after less at a higher price.

Ownership: an autograd graph holds slots, a slot its call, a call the earlier calls whose outputs it reads. So a part of
the region lives as long as some graph needs it, whatever happens to the rest, and nothing is held in a circle.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.divergence import numbered
from autockpt.checkpointing.fingerprint import Place, layout_of
from autockpt.checkpointing.frame import diverged
from autockpt.checkpointing.replay_context import as_in_forward, one_at_a_time
from autockpt.errors import AutockptError
from autockpt.policies.arguments import tensors_of
from autockpt.policies.assigned import saving
from autockpt.policies.replay import Replay
from autockpt.policies.rerun_state.surroundings import user_dispatch_modes
from autockpt.policies.rerun_state.tensors import place_of
from autockpt.policies.saved import Kept, Watched
from autockpt.policies.slots import Enough, Filler, Slot, as_it_is
from autockpt.policies.user_checkpoint import hooks_in_force


class _Outside:
    """An input that no call of this region has returned. Kept.

    That of a unit by itself in the way in which all around it is kept: another choice or the user's own hooks may move
    it off the device, or make it again. Calls of a larger region may need it more often in one backward, which hooks
    like those of ``torch.utils.checkpoint`` refuse. ``fields``: attributes that were set on the tensor.
    """

    __slots__ = ("_packed", "_trains", "_unpack", "fields")

    def __init__(self, tensor: torch.Tensor, unit: str, *, alone: bool) -> None:
        self._trains, self.fields = tensor.requires_grad, tensor.__dict__.copy()
        hooks = hooks_in_force(False) if alone else None
        if hooks is None:
            self._packed, self._unpack = Kept(tensor.detach(), unit), Kept.unpack
        else:
            self._packed, self._unpack = hooks[0](tensor), hooks[1]

    def value(self) -> torch.Tensor:
        return _as_input(self._unpack(self._packed), self._trains, self.fields)


class _Inside:
    """An input that an earlier call returned as its ``leaf``-th tensor. Not kept."""

    __slots__ = ("_trains", "_watched", "call", "fields", "leaf")

    def __init__(self, call: UnitCall, leaf: int, tensor: torch.Tensor, unit: str) -> None:
        self.call, self.leaf = call, leaf
        self._watched, self._trains = Watched(tensor, unit), tensor.requires_grad
        self.fields = tensor.__dict__.copy()

    def value(self) -> torch.Tensor:
        """Raises InPlaceError where the tensor was changed in place since, as autograd itself would."""
        self._watched.check()
        return _as_input(self.call.outputs[self.leaf], self._trains, self.fields)


def _as_input(value: torch.Tensor, trains: bool, fields: dict[str, Any]) -> torch.Tensor:
    value = value.detach().requires_grad_(trains) if trains or fields else value
    if fields:
        vars(value).update(fields | vars(value))  # those of a tensor in parts are its own
    return value


class UnitCall:
    """One call of a unit: what it needs to run again, and the slots that wait for it.

    ``number`` orders the calls of one region; ``readers`` are the numbers of later calls that read an output;
    ``outputs`` holds those values, without a graph, only while backward is at work on the region. ``region``: what is
    known of the calls before; None for a unit by itself.
    """

    def __init__(self, replay: Replay, region: Region | None = None) -> None:
        self.unit = replay.state.unit
        self.number, self.levels = (0, 1) if region is None else (region.calls, region.levels)
        self._replay = replay
        self._sources: list[_Outside | _Inside] = []
        self._positions: list[int] = []
        self._slots: list[weakref.ref[Slot]] = []
        check = replay.state.check
        # what a dispatch mode counts goes on in the second run, and its results may go by that
        checked = True if user_dispatch_modes() else None
        self._observer = check.observer(checked=checked) if check is not None else None
        self._look_at = numbered(self._observer)
        self._must_end = replay.state.memory.code.must_end
        self.readers: dict[int, list[int]] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self._bind(region)

    def _bind(self, region: Region | None) -> None:
        """Note where every input comes from. One that is given twice stays one: attention looks whether q is k."""
        seen: dict[int, int] = {}
        for tensor in self._replay.tensors:
            position = seen.setdefault(id(tensor), len(self._sources))
            self._positions.append(position)
            if position < len(self._sources):
                continue
            if region is None or (found := region.find(tensor)) is None:
                self._sources.append(_Outside(tensor, self.unit, alone=region is None))
            else:
                call, leaf = found
                call.readers.setdefault(leaf, []).append(self.number)
                self._sources.append(_Inside(call, leaf, tensor, self.unit))

    def run(self) -> Any:
        """The first, ordinary forward. Raises ConflictError where it did what cannot be done twice."""
        replay = self._replay
        with saving(self.unit, self._pack, self._observer):
            output = replay(*(tensors := replay.tensors))
        replay.finish()
        if replay.reached.doubts:
            replay.try_again(tensors, output)
        return output

    def _pack(self, tensor: torch.Tensor) -> Slot:
        slot = Slot(self, tensor, None if self._look_at is None else self._look_at(tensor))
        self._slots.append(weakref.ref(slot))
        return slot

    def refill(self) -> None:
        """Fill this call's slots; with one level, too, those of the earlier calls that must run for it anyway.

        Raises InPlaceError where something that a call read was changed since, ConflictError where a call does not do
        again what it did.
        """
        with one_at_a_time(self.unit):
            order = self._with_ancestors()
            try:
                with as_in_forward():
                    for call in order:
                        call._run_again(self, fill=call is self or (self.levels == 1 and call._waits()))
            except BaseException:
                for call in order:
                    call.outputs.clear()
                raise

    def _with_ancestors(self) -> list[UnitCall]:
        """The calls that must run, in their order, this one last: those whose outputs are needed and not there."""
        found: dict[int, UnitCall] = {}
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
        return any(slot.waits for ref in self._slots if (slot := ref()) is not None)

    def _run_again(self, target: UnitCall, fill: bool) -> None:
        """Run as in forward; ``target`` is the last call of this refill, which ends as soon as its slots are full
        unless it has to go on to its end."""
        filler = Filler(self.unit, self._slots, fills=fill, stops=self is target and not self._must_end)
        tensors = self._inputs()
        self._replay.prepare()
        for slot in filter(None, (ref() for ref in self._slots)):
            if slot.entry is not None:
                slot.entry.look_again()
        try:
            # hooks in any case: backward may have been called inside a unit's forward, whose own are in force then
            with saved_tensors_hooks(filler.pack, as_it_is):
                output = self._replay(*tensors)
        except Enough:
            output = None
        except (StopIteration, LookupError, AttributeError, AssertionError, TypeError, ValueError) as error:
            # such as where the first run has used up an iterator, or asks for the graph that its input came from
            said = f"raised {type(error).__name__} when it ran again in backward, which it did not in forward"
            raise diverged(self.unit, said) from error
        except RuntimeError as error:  # may be that memory is out, which others know by its type and message
            output = None
            if not (filler.full or isinstance(error, AutockptError)):
                error.add_note(
                    f"autockpt: {self.unit} ran again for backward and had not raised this in forward. Unless memory "
                    "or a device failed, something that it reads has changed in between: use `save` or `offload` there."
                )
            if not filler.full:  # what runs TorchScript makes an error of its own of Enough
                raise
        filler.ended(self._replay.reached.moved)
        self._keep_outputs(output, target.number)
        self._drop_inputs(target)

    def _inputs(self) -> list[torch.Tensor]:
        """The replay's tensors without their history."""
        if live := self._replay.tensors:
            self._replay.takes_gradients()
            # The forward is not over: a gradient is taken inside of it. What is around may hand out only once what it
            # was given to keep, and that is for the backward to come.
            pairs = zip(self._positions, live, strict=True)
            kept = {place: _as_input(t.detach(), t.requires_grad, self._sources[place].fields) for place, t in pairs}
            return [kept[place] for place in self._positions]
        values = [source.value() for source in self._sources]
        return [values[place] for place in self._positions]

    def _keep_outputs(self, output: Any, until: int) -> None:
        wanted = [leaf for leaf, readers in self.readers.items() if min(readers) <= until and self.number < until]
        if wanted:
            tensors = tensors_of(output)
            self.outputs |= {leaf: tensors[leaf].detach() for leaf in wanted}

    def _drop_inputs(self, target: UnitCall) -> None:
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


class Region:
    """What the units of one segment share: the calls of one pass, so that each finds the outputs of those before it.

    A pass begins with the model's forward, or where a unit is called out of turn: a unit that is called twice belongs
    to two passes. So do all calls where a tensor may be written to ``unseen`` between two units: what a unit is given
    need not be what the one before it returned, and is kept.

    An output is known again by its storage, layout and version, not by its Python object: hooks of modules hand on new
    tensors over the same memory. Of calls only those are known whose graph is alive: a pass may end early.

    A storage's Python object lives as long as the storage, so an address whose storage was freed and given to another
    is not mistaken.
    """

    def __init__(self, size: int, levels: int, unseen: bool) -> None:
        self.size, self.levels, self.unseen = size, levels, unseen
        self.begin()

    def begin(self) -> None:
        """Whatever is called next has nothing to do with what was called before."""
        self.calls, self._last = 0, -1
        self._known: dict[Place, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[UnitCall], int]] = {}

    end = begin

    def __reduce__(self) -> tuple[type[Region], tuple[int, int, bool]]:
        return Region, (self.size, self.levels, self.unseen)

    def run(self, position: int, replay: Replay) -> Any:
        """The first, ordinary forward of a unit, the how manieth of the segment. Raises as ``UnitCall.run``.

        A tensor with a history that is hidden in an unknown object is kept as it is: were it an output of this very
        pass, the pass would hold itself alive.
        """
        hides = any(t is not None and t.requires_grad for t in replay.hidden.tensors)
        if position <= self._last or hides or self.unseen:
            self.begin()
        self._last, known = position, self._known
        try:
            call = UnitCall(replay, self)
            self.calls += 1
            output = call.run()
        except BaseException:
            self.begin()
            raise
        for leaf, tensor in enumerate(tensors_of(output)):
            if (layout := _layout(tensor)) is not None:
                known[layout] = weakref.ref(tensor.untyped_storage()), tensor._version, weakref.ref(call), leaf
        if position == self.size - 1:
            self.begin()
        return output

    def find(self, tensor: torch.Tensor) -> tuple[UnitCall, int] | None:
        """The call that returned a tensor, and as which of its outputs."""
        layout = _layout(tensor) if self._known else None
        if layout is None or (known := self._known.get(layout)) is None:
            return None
        storage, version, known_call, leaf = known
        if (call := known_call()) is None or storage() is None or tensor._version != version:
            return None
        return call, leaf


def _layout(tensor: torch.Tensor) -> Place | None:
    """What tells a plain tensor from every other that is alive; None for other kinds, which are simply kept."""
    if type(tensor) is not torch.Tensor or not place_of(tensor) or tensor.is_conj() or tensor.is_neg():
        return None
    return None if tensor.is_inference() else (place_of(tensor), *layout_of(tensor))  # inference: without a version
