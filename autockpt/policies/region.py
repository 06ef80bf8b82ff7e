"""Calls of units whose saved tensors are made again: each runs in its normal place, and keeps its inputs.

What autograd saves is replaced by empty slots. Backward fills them by running the call again, under its own random
state, autocast and buffers. An autograd graph holds slots, and a slot its call: nothing is held in a circle.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.divergence import numbered
from autockpt.checkpointing.frame import diverged
from autockpt.checkpointing.replay_context import as_in_forward, one_at_a_time
from autockpt.errors import AutockptError
from autockpt.policies.assigned import saving
from autockpt.policies.replay import Replay
from autockpt.policies.rerun_state.surroundings import user_dispatch_modes
from autockpt.policies.saved import Kept
from autockpt.policies.slots import Enough, Filler, Slot, as_it_is
from autockpt.policies.user_checkpoint import hooks_in_force


class _Input:
    """An input, kept in the way in which all around the unit is kept: another choice or the user's own hooks may move
    it off the device, or make it again. ``fields``: attributes that were set on the tensor."""

    __slots__ = ("_packed", "_trains", "_unpack", "fields")

    def __init__(self, tensor: torch.Tensor, unit: str) -> None:
        self._trains, self.fields = tensor.requires_grad, tensor.__dict__.copy()
        hooks = hooks_in_force(False)
        if hooks is None:
            self._packed, self._unpack = Kept(tensor.detach(), unit), Kept.unpack
        else:
            self._packed, self._unpack = hooks[0](tensor), hooks[1]

    def value(self) -> torch.Tensor:
        return _as_input(self._unpack(self._packed), self._trains, self.fields)


def _as_input(value: torch.Tensor, trains: bool, fields: dict[str, Any]) -> torch.Tensor:
    value = value.detach().requires_grad_(trains) if trains or fields else value
    if fields:
        vars(value).update(fields | vars(value))  # those of a tensor in parts are its own
    return value


class UnitCall:
    """One call of a unit: what it needs to run again, and the slots that wait for it."""

    def __init__(self, replay: Replay) -> None:
        self.unit = replay.state.unit
        self._replay = replay
        self._sources: list[_Input] = []
        self._positions: list[int] = []
        self._slots: list[weakref.ref[Slot]] = []
        check = replay.state.check
        # what a dispatch mode counts goes on in the second run, and its results may go by that
        self._observer = check.observer(new=bool(user_dispatch_modes())) if check is not None else None
        self._look_at = numbered(self._observer)
        self._must_end = replay.state.memory.code.must_end
        seen: dict[int, int] = {}
        for tensor in replay.tensors:  # one that is given twice stays one: attention looks whether q is k
            position = seen.setdefault(id(tensor), len(self._sources))
            self._positions.append(position)
            if position == len(self._sources):
                self._sources.append(_Input(tensor, self.unit))

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
        """Fill this call's slots.

        Raises InPlaceError where something that the call read was changed since, ConflictError where it does not do
        again what it did.
        """
        with one_at_a_time(self.unit), as_in_forward():
            self._run_again()

    def _run_again(self) -> None:
        """Run as in forward. It ends as soon as the slots are full unless it has to go on to its end."""
        filler = Filler(self.unit, self._slots, stops=not self._must_end)
        tensors = self._inputs()
        self._replay.prepare()
        for slot in filter(None, (ref() for ref in self._slots)):
            if slot.entry is not None:
                slot.entry.look_again()
        try:
            # hooks in any case: backward may have been called inside a unit's forward, whose own are in force then
            with saved_tensors_hooks(filler.pack, as_it_is):
                self._replay(*tensors)
        except Enough:
            pass
        except (StopIteration, LookupError, AttributeError, AssertionError, TypeError, ValueError) as error:
            # such as where the first run has used up an iterator, or asks for the graph that its input came from
            said = f"raised {type(error).__name__} when it ran again in backward, which it did not in forward"
            raise diverged(self.unit, said) from error
        except RuntimeError as error:  # may be that memory is out, which others know by its type and message
            if not (filler.full or isinstance(error, AutockptError)):
                error.add_note(
                    f"autockpt: {self.unit} ran again for backward and had not raised this in forward. Unless memory "
                    "or a device failed, something that it reads has changed in between: use `save` or `offload` there."
                )
            if not filler.full:  # what runs TorchScript makes an error of its own of Enough
                raise
        filler.ended(self._replay.reached.moved)

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
