"""Consecutive units that share one recomputation: of what passes between them nothing is kept.

A frame of a segment holds an input that an earlier call of the segment returned by a reference to that call's frame.
Recomputing the frame recomputes the earlier one first, to its end, which fills the earlier frame's tensors on the way:
each unit runs again once, and backward finds the whole segment's tensors.

An output is known by its storage, layout and version and not by its Python object: module hooks (FSDP2's, full backward
hooks) hand on new tensors over the same memory. A storage's Python object lives as long as the storage, so an address
that was freed and given to another storage is not mistaken.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from autockpt.checkpointing.arguments import Held, hold, tensors_of
from autockpt.checkpointing.fingerprint import Layout, layout_of, probe_of
from autockpt.checkpointing.frame import CheckpointFrame
from autockpt.errors import InPlaceError

_Key = tuple[int, Layout]


class SegmentCalls:
    """Which calls of one segment returned what, in the present forward of the model."""

    def __init__(self) -> None:
        self.begin()
        self.recomputed: dict[int, list[torch.Tensor]] = {}  # outputs by frame, until a recomputation is over

    def begin(self) -> None:
        """A forward of the whole model begins: forget the one before."""
        self._returned: dict[_Key, tuple[weakref.ref[torch.UntypedStorage], int, weakref.ref[SegmentFrame], int]] = {}

    end = begin

    def __reduce__(self) -> tuple[type[SegmentCalls], tuple[()]]:
        return SegmentCalls, ()

    def note(self, frame: SegmentFrame, output: Any) -> None:
        """A call has returned ``output``."""
        call = weakref.ref(frame)
        for number, tensor in enumerate(tensors_of(output)):
            if (key := _key_of(tensor)) is not None:
                self._returned[key] = weakref.ref(tensor.untyped_storage()), tensor._version, call, number

    def hold(self, tensors: list[torch.Tensor]) -> list[Held]:
        """Hold inputs of a call: by the calls that returned them, where there are any."""
        return [self._returned_by(tensor) or hold([tensor])[0] for tensor in tensors]

    def _returned_by(self, tensor: torch.Tensor) -> _Returned | None:
        key = _key_of(tensor) if self._returned else None
        if key is None or (known := self._returned.get(key)) is None:
            return None
        storage, version, frame_ref, number = known
        frame = frame_ref()  # None where its graph was freed
        if frame is None or storage() is None or tensor._version != version:
            return None
        return _Returned(frame, number, tensor)


class _Returned:
    """The tensor of this ``number`` among those that an earlier call returned."""

    __slots__ = ("_frame", "_number", "_probe", "_size", "_version")

    def __init__(self, frame: SegmentFrame, number: int, tensor: torch.Tensor) -> None:
        self._frame, self._number, self._size, self._version = frame, number, tensor.size(), tensor._version
        self._probe = probe_of(tensor)

    def unpack(self) -> torch.Tensor:
        """As ``Holder.unpack``. Raises InPlaceError where it was changed in place, as autograd would."""
        if self._probe._version != self._version:
            what = f"that {self._frame.name} returned"
            raise InPlaceError.of(self._size, self._probe._version, self._version, what)
        return self._frame.outputs()[self._number]


class SegmentFrame(CheckpointFrame):
    """One call of a unit in a segment."""

    __slots__ = ("__weakref__", "_calls")

    def __init__(self, calls: SegmentCalls, *given: Any) -> None:
        self._calls = calls
        super().__init__(*given, hold=calls.hold)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As ``CheckpointFrame.run``."""
        output = super().run(args, kwargs)
        self._calls.note(self, output)
        return output

    def outputs(self) -> list[torch.Tensor]:
        """What the call returned, recomputed: the tensors in it, without a graph."""
        found = self._calls.recomputed.get(id(self))
        if found is None:
            output = self._fill(to_end=True)
            found = self._calls.recomputed[id(self)] = [tensor.detach() for tensor in tensors_of(output)]
        return found

    def _recompute(self, number: int) -> None:
        try:
            super()._recompute(number)
        finally:
            self._calls.recomputed.clear()


def _key_of(tensor: torch.Tensor) -> _Key | None:
    """What tells a plain tensor from every other that is alive; None for other kinds, which are held."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return None
    return tensor.untyped_storage()._cdata, layout_of(tensor)
