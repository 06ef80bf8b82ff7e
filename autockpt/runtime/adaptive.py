"""Choose leaner sets of choices before a memory budget would break, and richer ones once there is room again.

One question is asked at each forward: which is the richest set, from the batch's own on, that this batch has room for?
What a batch takes is learned from the device's own counters, by set and size. The room is what is free when an
accumulation begins: somebody else may have taken memory since the last one. All answers change between optimizer steps
alone, so that the micro-batches of one accumulation do not move about.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autockpt.devices import get_device
from autockpt.devices.accelerator import AcceleratorDevice
from autockpt.errors import MeasurementError, UsageError
from autockpt.schema.choices import RECOMPUTE, Choice
from autockpt.schema.names import ancestors, outermost
from autockpt.schema.sizes import format_binary

_log = logging.getLogger("autockpt")

PRESSED, ROOM = 0.95, 0.90
"""Shares of the limit that a batch may fill: by the set that it goes by, and by a richer one that is to be taken."""
PATIENCE, MOST_PATIENCE = 20, 640
"""Optimizer steps before a set that tore the allocator's memory is tried again; each time twice as many."""
COOL = 5  # optimizer steps at least between two times that the cache is given back
SEGMENT = 20 << 20
"""What the caching allocator takes at least for tensors above 1 MiB. A new holder of memory may have torn one."""
TAKEN = 0.05
"""The share of the room for a step that counts as taken by somebody, rather than as a change from step to step."""
FORGET = 16  # the part by which a size's largest need goes down to a smaller one that is seen later
APART = 1.25  # sizes that say something about the slope between them
UNSEEN = 0.75
"""A set that was never used is taken to need so much of what a richer one does beyond what a leaner one does."""
_RICHER = ("save", "remake", "selective", "keep_attention")


def metered(device: torch.device) -> AcceleratorDevice | None:
    """The device whose counters tell what training takes; None where nothing does, as on a CPU."""
    try:
        found = get_device(str(device))
        found.describe()
    except (UsageError, MeasurementError):  # of a kind that is not known, or its allocator tells no peak
        return None
    return found if isinstance(found, AcceleratorDevice) else None


class Move(NamedTuple):
    """A change to leaner choices, or back, for batches of about so many tokens: after which optimizer step, by how many
    sets, and why."""

    step: int
    leaner: int
    why: str
    tokens: int

    def __str__(self) -> str:
        which = f"batches of about {self.tokens:,} tokens go {self.leaner} leaner than their own set"
        return f"after optimizer step {self.step}: {self.why}; {which}"


class LearnedPeaks:
    """Bytes above what was held when an accumulation began, by set (the richest first) and tokens of the batch."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, tuple[int, float]]] = {}  # by set and class of sizes: largest size, bytes

    def learn(self, number: int, tokens: int, took: int) -> None:
        """A batch took so many bytes."""
        seen, group = self._seen.setdefault(number, {}), size_class(tokens)
        most, before = seen.get(group, (0, 0.0))
        seen[group] = max(most, tokens), max(took, before - (before - took) / FORGET)

    def seen(self, number: int, tokens: int) -> bool:
        """Whether a batch at least as large has run by this set."""
        return any(tokens <= size for size, _ in self._seen.get(number, {}).values())

    def of(self, number: int, tokens: int) -> float | None:
        """What a batch would take at most; None where that is unknown.

        A set that was never used is placed between its neighbours, and takes as much as the richer one alone.
        """
        if (own := self._line(number, tokens)) is not None:
            return own
        lines = {n: line for n in sorted(self._seen) if (line := self._line(n, tokens)) is not None}
        above = next((lines[n] for n in reversed(lines) if n < number), None)
        below = next((lines[n] for n in lines if n > number), None)
        if above is None or below is None:
            return above
        return max(below, UNSEEN * above + (1 - UNSEEN) * below)

    def _line(self, number: int, tokens: int) -> float | None:
        """Between sizes that were seen on a straight line, beyond them on one that gets steeper, as scores of attention
        grow with the square."""
        known = sorted(self._seen.get(number, {}).values())
        if not known:
            return None
        sizes, took = [size for size, _ in known], [*accumulate((took for _, took in known), max)]
        most, last = sizes[-1], took[-1]
        if tokens <= most:
            return float(numpy.interp(tokens, sizes, took))
        apart = [(last - less) / (most - size) for size, less in zip(sizes, took, strict=True) if most >= APART * size]
        return last + max(apart, default=last / most) * (tokens - most) * tokens / most


def size_class(tokens: int) -> int:
    """The largest of the sizes that count as one with this: there are eight to each doubling."""
    shift = max(0, tokens.bit_length() - 4)
    return -(-tokens >> shift) << shift


class Adaptive:
    """By which set of choices each batch trains. ``rungs`` are the model's sets, the richest first.

    ``limit`` is the budget in bytes (None: all that the device has). What tensors may take of it is less: none lie in
    the context, and others may hold so much of the device that it cannot be had.
    """

    def __init__(self, model: nn.Module, device: AcceleratorDevice, limit: int | None, rungs: int) -> None:
        self.device, self.limit, self.rungs = device, (limit or device.capacity()) - device.context_bytes(), rungs
        self.steps, self.moves = 0, list[Move]()
        self._model = weakref.ref(model)
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, bool]()  # whether they are the model's
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        self._open = False  # whether an accumulation has begun
        self._batch: tuple[int, int] | None = None  # set and tokens of the forward since which peaks are counted
        self._peaks = LearnedPeaks()
        self._took = list[tuple[int, int, int, bool]]()  # in this accumulation: set, tokens, bytes, whether it retried
        self._base = self._free = self._most_room = self._last_room = 0
        self._retries = self._reserved = self._torn = 0
        self._given = -COOL  # the step after which the cache was given back
        self._rests: dict[int, tuple[int, int]] = {}  # by set: batches of so many tokens or more, until which step
        self._patience: dict[int, int] = {}
        self._leaner: dict[int, int] = {}  # by class of sizes, as last reported

    def remove(self) -> None:
        """Watch optimizers no longer. Idempotent."""
        self._hook.remove()

    def choose(self, planned: int, tokens: int, promised: bool) -> int:
        """The set for a forward that begins, of which the batch's own is ``planned``.

        ``promised``: the plan was made for batches of this size.
        """
        if self._open:
            self._note(learn=True)
            self.device.reset_peaks()
        else:
            self._begin()
        kind, chosen = size_class(tokens), planned
        before = self._leaner.get(kind, 0)
        while chosen < self.rungs - 1:
            share = ROOM if chosen < planned + before else PRESSED
            if self._fits(chosen, tokens, promised and chosen == planned, share):
                break
            chosen += 1
        if self._less and self._given < self.steps and not self._fits(chosen, tokens, False, PRESSED):
            self._give_back()  # its last chance: memory that is not torn
        if chosen - planned != before:
            self._leaner[kind] = leaner = chosen - planned
            room = format_binary(max(0, self._room))
            why = f"it might need more than the {room} free" if leaner > before else f"{room} are free again"
            self.moves.append(Move(self.steps, leaner, why, tokens))
            _log.log(logging.WARNING if leaner > before else logging.INFO, "%s", self.moves[-1])
        return chosen

    def runs(self, number: int, tokens: int) -> None:
        """By which set the forward really goes: other ranks may have wanted a leaner one."""
        self._batch = (number, tokens)

    @property
    def _limit(self) -> int:
        """What may be held: the budget, or what others left of the device when it was looked at last."""
        return min(self.limit, self._free)

    @property
    def _room(self) -> int:
        return self._limit - self._base

    @property
    def _less(self) -> bool:
        """Whether somebody has taken memory since training began: the plan's promise was for more."""
        return self._room < self._most_room * (1 - TAKEN)

    def _fits(self, number: int, tokens: int, promised: bool, share: float) -> bool:
        """Whether a batch has room by a set, as memory was when this accumulation began.

        The allocator may not find room in one piece for a batch that is larger than any before.
        """
        least, until = self._rests.get(number, (0, 0))
        if self.steps < until and tokens >= least:
            return False
        seen, takes = self._peaks.seen(number, tokens), self._peaks.of(number, tokens)
        if takes is None or (promised and not seen and not self._less):
            return True
        margin = (1 - share) * self._limit
        return takes + (margin if seen else max(margin, self._torn + SEGMENT)) <= self._room

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            model = self._model()
            ours = {id(p) for p in model.parameters()} if model is not None else set()
            self._optimizers[optimizer] = any(id(p) in ours for g in optimizer.param_groups for p in g["params"])
        if self._open and self._optimizers[optimizer]:
            self._note(learn=self.steps > 0)  # the first step makes what optimizers keep, which no later one takes
            self.steps += 1
            self._open = False  # what runs until the next forward, an evaluation say, is not training

    def _note(self, *, learn: bool) -> None:
        """What the forward before this moment took, with its backward and the optimizer's step."""
        reading = self.device.memory()
        self._reserved = max(self._reserved, reading.reserved_peak)
        self._torn = max(0, reading.reserved - reading.allocated_peak)
        if self._batch is not None:
            took = max(0, reading.allocated_peak - self._base) if learn else 0
            self._took.append((*self._batch, took, reading.retries > self._retries))
        self._retries, self._batch = reading.retries, None

    def _rest(self, number: int, tokens: int) -> None:
        """Memory was too torn for such a batch by a set: no more of them for some time."""
        self._patience[number] = patience = min(MOST_PATIENCE, 2 * self._patience.get(number, PATIENCE // 2))
        self._rests[number] = tokens, self.steps + patience

    def _begin(self) -> None:
        """An accumulation begins: learn from the last one, and look at what is held and free."""
        self._open = True
        reading = self.device.memory()
        self._base, self._free, self._retries = reading.allocated, reading.free, reading.retries
        room = self._room
        if self.steps <= 1:  # what optimizers keep is there from the first step's end on
            self._most_room = self._last_room = room
        over, taken = self._reserved > self._limit, room < self._last_room * (1 - TAKEN)
        if over and self._given == self.steps - 1 and self._took:  # not what the cache held since a richer set
            self._rest(*max(self._took, key=lambda each: each[2])[:2])
        for number, tokens, took, retried in self._took:
            if took:
                self._peaks.learn(number, tokens, took)
            if retried:
                self._rest(number, tokens)
        self._took, self._reserved = [], 0
        self._most_room, self._last_room = max(self._most_room, room), room
        if (taken or over) and self.steps - self._given >= COOL:
            self._give_back()
        else:
            self.device.reset_peaks()

    def _give_back(self) -> None:
        """Return what the allocator's cache holds to the device, and count peaks from now on."""
        self._given = self.steps
        self.device.release()


def leaner_choices(choices: Mapping[str, Choice]) -> list[dict[str, Choice]]:
    """Leaner than these, in order: the first half of the units that keep much recompute, then all of them. Empty where
    none keeps much. Choices inside of a unit go with it."""
    keeping = [name for name in outermost(choices) if "block" in choices[name].roles and choices[name].kind in _RICHER]
    found = []
    for count in dict.fromkeys((len(keeping) // 2, len(keeping))):
        changed = set(keeping[:count])
        if changed:
            inner = {n: c for n, c in choices.items() if not changed & set(ancestors(n))}
            found.append({n: RECOMPUTE if n in changed else c for n, c in inner.items()})
    return found
