"""Spot checks: of every call that is not checked whole, a few of the tensors that backward is given are compared at one
place each.

What changes between forward and backward (a weight, an attribute, a random state) changes nearly all that is computed
after it. So the last tensor that a unit computes and saves tells of it, whatever it was, in the very step in which it
begins; where outputs in between are kept, those before tell that are looked at in turn. Memory of the host is read at
once; what a device holds is copied there, compared when the next step begins, and read when the one after that does, so
that nobody waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from autockpt.errors import RerunMismatch
from autockpt.policies.conflicts import current_node, is_wrapped, sequence_nr
from autockpt.policies.fingerprints import left_unwritten, quietly, stream_of
from autockpt.policies.sketches import distance_of, repeats, tolerance_of

if TYPE_CHECKING:
    from autockpt.policies.sentinels import UnitSentinel

PLACE = 8
"""Neighbouring elements that are compared, others in every step."""
IN_TURN = 2
"""Tensors of each call that are looked at besides the last."""
_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}
ROOM = 4.0
"""Few elements may be farther apart than a whole tensor is, relative to their length, by rounding alone."""


def is_computed(tensor: torch.Tensor, since: int) -> bool:
    """Whether a unit whose forward began at this autograd sequence number has computed it, with a gradient."""
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() >= since


def can_be_spotted(tensor: torch.Tensor, since: int) -> bool:
    """Whether the unit has computed it, or may have without a gradient, and it lies in one piece."""
    return (
        (is_computed(tensor, since) or not tensor.requires_grad)
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_floating_point()
        and _order_of(tensor) is not None
        and tensor.numel() >= PLACE
        and not (tensor.is_meta or tensor.is_neg() or is_wrapped(tensor))
    )


def _order_of(tensor: torch.Tensor) -> torch.memory_format | None:
    """How its elements lie one after the other; None where they do not."""
    if tensor.is_contiguous():
        return torch.contiguous_format
    for order in _CHANNELS_LAST.get(tensor.dim(), ()):
        if tensor.is_contiguous(memory_format=order):
            return order
    return None


def _held(tensor: torch.Tensor, first: int) -> bytes | torch.Tensor:
    """What a tensor holds from an element on, as they lie: bytes of the host's memory, or a copy on its device."""
    if tensor.is_cpu:
        width = tensor.element_size()
        address = tensor.data_ptr()
        return ctypes.string_at(address + first * width, PLACE * width) if address else b""
    with quietly(), torch._C.DisableTorchFunction():
        return tensor.detach().as_strided((PLACE,), (1,), tensor.storage_offset() + first).clone()


class Places:
    """What one call of a unit saved, and which of it later calls look at: the ``last`` that was computed with a
    gradient, and others in turn."""

    def __init__(self, saved: int, fit: Sequence[int], last: int | None = None) -> None:
        self.saved = saved
        last = fit[-1] if fit and last is None else last
        self._turns = [frozenset((last, *fit[i : i + IN_TURN])) for i in range(0, len(fit), IN_TURN)]

    def in_turn(self, call: int) -> frozenset[int | None]:
        """The numbers of those that this call looks at."""
        return self._turns[call % len(self._turns)] if self._turns else frozenset()


class SpotCheck:
    """One call of a unit. All that it saves beyond what calls saved before is looked at: it does something new."""

    __slots__ = ("_seen", "_sentinel", "_since", "beyond", "chosen")

    def __init__(self, sentinel: UnitSentinel, places: Places) -> None:
        self._sentinel, self.beyond, self.chosen = sentinel, places.saved, places.in_turn(sentinel.calls)
        self._seen, self._since = -1, sequence_nr()

    def packed(self, tensor: torch.Tensor) -> SpottedTensor | None:
        """Autograd saves a tensor, and something else will be handed out for it. None where it is not looked at."""
        self._seen = seen = self._seen + 1
        return self.look_at(seen, tensor) if seen in self.chosen or seen >= self.beyond else None

    def look_at(self, number: int, tensor: torch.Tensor) -> SpottedTensor | None:
        """The same of one that is to be looked at."""
        if can_be_spotted(tensor, self._since):
            return SpottedTensor(self._sentinel, number, tensor)
        return None

    def before_rerun(self, module: nn.Module) -> None:
        """Nothing: only whole checks look at a unit's own state."""

    def after_rerun(self) -> None:
        """Nothing."""


class SpottedTensor:
    """A saved tensor: what it held at one place."""

    __slots__ = ("_first", "_held", "_number", "_order", "_step", "_stream", "_what", "sentinel")

    def __init__(self, sentinel: UnitSentinel, number: int, tensor: torch.Tensor) -> None:
        self.sentinel, self._number = sentinel, number
        self._step = sentinel.sentinels.step or sentinel.calls
        self._first, self._order = self._step * 7919 % (tensor.numel() - PLACE + 1), _order_of(tensor)
        self._held, self._stream = _held(tensor, self._first), None if tensor.is_cpu else stream_of(tensor.device)

    def look_again(self) -> None:
        """Nothing: it counts what it held when it was saved."""

    def handed(self, value: torch.Tensor) -> None:
        """Backward is given ``value`` for it. Raises RerunMismatch at once where the host can see that it differs."""
        stream = None if value.is_cpu else stream_of(value.device)
        if stream != self._stream or _order_of(value) is not self._order:
            return
        if (node := current_node()) is not None and left_unwritten(node, value):
            return
        found = _held(value, self._first)
        self.sentinel.spots += 1
        if isinstance(found, bytes) and found == self._held:
            return
        self._what = tensor_read(value.dtype, value.size(), self._number)
        if isinstance(found, bytes):
            raise self.sentinel.sentinels.noted(self.error())
        self.sentinel.sentinels.spots.pairs.append(Pair(self, self._held, found, stream))

    def error(self) -> RerunMismatch:
        """The error for what backward was given."""
        return self.sentinel.mismatch(self._step, self._what)


def tensor_read(dtype: torch.dtype, size: torch.Size, number: int) -> str:
    """In words the tensor that the present node of a backward reads, the one of this ``number`` among those saved."""
    node = current_node()
    reader = f"{node.name()} reads" if node is not None else "is read"
    what = f"{str(dtype).removeprefix('torch.')} tensor {tuple(size)}"
    return f"the {what} that {reader} (number {number + 1} of those that forward saved)"


class Pair(NamedTuple):
    """Two copies on a device of what should be one and the same."""

    spotted: SpottedTensor
    expected: Any
    found: torch.Tensor
    stream: Any


class Coming(NamedTuple):
    """How far the two of each pair are apart, on the way to the host; all has ``arrived`` after this event."""

    spotted: list[SpottedTensor]
    distances: torch.Tensor
    tolerance: float
    arrived: Any


class DeviceSpots:
    """Pairs of the present step, and what became of those of steps before."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._coming: list[Coming] = []

    def __bool__(self) -> bool:
        return bool(self.pairs or self._coming)

    def next_step(self) -> SpottedTensor | None:
        """Compare the pairs. Returns the first tensor of an earlier step that is known by now to differ."""
        while self._coming and (self._coming[0].arrived is None or self._coming[0].arrived.query()):
            some = self._coming.pop(0)
            for spotted, distance in zip(some.spotted, some.distances.tolist(), strict=True):
                if distance > some.tolerance:
                    return spotted
        pairs, self.pairs = self.pairs, []
        groups: dict[tuple[torch.dtype, Any], list[Pair]] = {}
        for pair in pairs:
            groups.setdefault((pair.found.dtype, pair.stream), []).append(pair)
        for (dtype, stream), alike in groups.items():
            self._send(alike, dtype, stream)
        return None

    def _send(self, pairs: list[Pair], dtype: torch.dtype, stream: Any) -> None:
        device = pairs[0].found.device
        if stream_of(device) != stream:
            return  # of another thread's step
        tolerance = 0.0 if repeats(device) else ROOM * tolerance_of(dtype)
        with quietly(), torch._C.DisableTorchFunction(), torch.no_grad():
            expected = torch.stack([pair.expected for pair in pairs]).float()
            found = torch.stack([pair.found for pair in pairs]).float()
            distances = distance_of(expected, found, dim=1).to("cpu", non_blocking=stream is not None)
        arrived = None if stream is None else stream.record_event()
        self._coming.append(Coming([pair.spotted for pair in pairs], distances, tolerance, arrived))
