"""What stands in an autograd graph for tensors that are made again: empty slots, and what fills them.

A slot knows the form of its tensor and whose run fills it. Between its making and its use the value is watched: hooks
on saved tensors switch off autograd's own check for changes in place.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from autockpt.checkpointing.divergence import Comparison
from autockpt.checkpointing.frame import diverged, refuse_late_written
from autockpt.errors import InPlaceError
from autockpt.policies.base import interned
from autockpt.policies.compiling import run_as_it_is

if TYPE_CHECKING:
    from autockpt.policies.region import UnitCall


class Enough(Exception):
    """All slots are filled. Like torch's own no BaseException: modules run hooks at exceptions of this kind only."""


class Slot:
    """Stands in an autograd graph for a saved tensor, which another run of a unit fills with one of this ``form``.

    ``value`` is there between its making and its use; ``entry`` where it is compared."""

    __slots__ = ("__weakref__", "entry", "form", "maker", "value", "version")

    def __init__(self, maker: UnitCall, tensor: torch.Tensor, entry: Comparison | None) -> None:
        self.value: torch.Tensor | None = None
        self.version, self.entry = 0, entry
        self.maker, self.form = maker, interned((tensor.size(), tensor.dtype, tensor.device))

    @property
    def waits(self) -> bool:
        """Whether nothing of use is in it. What was left by an earlier backward may have been changed since."""
        return self.value is None or self.value._version != self.version

    def fill(self, value: torch.Tensor) -> None:
        self.value, self.version = value, value._version

    @run_as_it_is
    def unpack(self) -> torch.Tensor:
        """For autograd. A value that was used up, as in a second backward, is made once more.

        Raises InPlaceError where the unit changes in place what backward needs, as autograd itself would, and
        ConflictError where a kernel wrote to it unseen, before which a second run may have ended.
        """
        refuse_late_written(self.maker.unit)
        if self.waits:
            self.maker.refill()
        value, self.value = self.value, None
        if value is None:
            raise diverged(self.maker.unit, "did not save a tensor again that it saved in forward")
        if value._version != self.version:
            tensor = f"{tuple(value.size())} that {self.maker.unit} saved"
            remedy = "Replace the in-place operation inside this unit by an out-of-place one."
            raise InPlaceError.of(tensor, value._version, self.version, remedy)
        if self.entry is not None:
            self.entry.handed(value)
        return value


class Filler:
    """Puts what a second run saves into the slots of the first.

    ``seen`` counts what was saved. With ``stops`` the run ends, by Enough, as soon as that is all.
    """

    def __init__(self, unit: str, slots: list[weakref.ref[Slot]], *, stops: bool) -> None:
        self._unit, self._slots, self._stops = unit, slots, stops
        self.seen = 0

    @run_as_it_is
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook for autograd's packing in a second run."""
        slots, seen = self._slots, self.seen
        if seen >= len(slots):
            raise diverged(self._unit, f"saved {len(slots)} tensors in forward and more when it ran again")
        # a graph that holds its own output by way of Python is never freed
        value = tensor.detach() if tensor.requires_grad else tensor
        slot = slots[seen]()
        self.seen = seen + 1
        if slot is not None:
            form = (value.size(), value.dtype, value.device)
            if slot.form != form:
                was, now = (f"{tuple(size)} {dtype} on {device}" for size, dtype, device in (slot.form, form))
                raise diverged(self._unit, f"saved a tensor {was} in forward and {now} when it ran again")
            if slot.waits:
                slot.fill(value)
        if self.full:
            raise Enough
        return value

    @property
    def full(self) -> bool:
        """Whether the run was to end, as all slots are filled."""
        return self._stops and self.seen == len(self._slots)

    def ended(self, moved: dict[int, int]) -> None:
        """The run has ended. State was put back after it, its version counters (from, to), too: what is saved of it is
        still good. Raises ConflictError where it saved less than the first."""
        if self.seen < len(self._slots):
            raise diverged(self._unit, f"saved {len(self._slots)} tensors in forward and {self.seen} when it ran again")
        for slot in filter(None, (ref() for ref in self._slots) if moved else ()):
            if slot.value is not None and moved.get(slot.version) == slot.value._version != slot.version:
                slot.version = slot.value._version


def as_it_is(tensor: Any) -> Any:
    """The hook for unpacking what is not packed."""
    return tensor
