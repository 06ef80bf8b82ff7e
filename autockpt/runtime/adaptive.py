"""Going by the real peak: leaner choices before a budget would break, back when there is room.

Moves are made between optimizer steps alone, by what is free when the next one begins: what the last one took says
nothing once somebody else has taken memory. What each set took for batches of each size, above what was held before,
says what it would take for the batch at hand, which goes by a leaner set itself where that is too much.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autockpt.runtime.learned_peaks import LearnedPeaks
from autockpt.schema.choices import RECOMPUTE, Choice
from autockpt.schema.names import ancestors, outermost
from autockpt.schema.sizes import format_binary

_log = logging.getLogger("autockpt")

PRESSED, ROOM = 0.95, 0.90
"""Shares of the limit: from the first on a leaner set is taken; a richer one has to stay below the second."""
PATIENCE, MOST_PATIENCE = 20, 640
"""Optimizer steps with room before a richer set is tried again; twice as many each time that it had to be given up."""
COOL = 5  # optimizer steps at least between two times that the cache is given back
SEGMENT = 20 << 20
"""What the caching allocator takes at least for tensors above 1 MiB. A new holder of memory may have torn one."""
TAKEN = 0.05
"""The share of the room for a step that counts as taken by somebody, rather than as a change from step to step."""
_RICHER = ("save", "remake", "selective", "keep_attention")


class MemoryReading(NamedTuple):
    """The most bytes since the last reset that tensors held and that the allocator did; how often the allocator had to
    give its cache back to serve a request, and could not serve it; what it holds now; and bytes that it may hold as far
    as others go."""

    allocated: int
    reserved: int
    retries: int
    failures: int
    held: int
    free: int


class Meter:
    """The counters of PyTorch's caching allocator for one accelerator, in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> MemoryReading:
        stats = torch.accelerator.memory_stats(self.device)
        free, _ = torch.accelerator.get_memory_info(self.device)
        cached = stats.get("reserved_bytes.all.current", 0)
        return MemoryReading(
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
            cached,
            free + cached,
        )

    def allocated(self) -> int:
        """What tensors hold now."""
        return torch.accelerator.memory_allocated(self.device)

    def reset(self, *, give_back: bool) -> None:
        """Count peaks from now on; ``give_back``: collect garbage and return cached memory to the device first."""
        if give_back:
            gc.collect()
            torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self.device)


class Move(NamedTuple):
    """A change to leaner choices, or back: after which optimizer step, by how many sets, and why.

    ``tokens``: where it is for batches of about that size and larger alone.
    """

    step: int
    leaner: int
    why: str
    tokens: int | None = None

    def __str__(self) -> str:
        which = "now" if self.tokens is None else f"batches of {self.tokens:,} tokens go"
        return f"after optimizer step {self.step}: {self.why}; {which} {self.leaner} leaner than the batch's own set"


def meter_of(device: torch.device) -> Meter | None:
    """What tells a device's memory while training; None where nothing does, as on a CPU."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        torch.accelerator.memory_stats(device)
        torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None
    return Meter(device)


@dataclass
class _Step:
    """What was seen from one optimizer step to the next: peaks in bytes, the largest batch of each set in tokens."""

    allocated: int = 0
    reserved: int = 0
    retried: bool = False
    sets: dict[int, int] = field(default_factory=dict)


class Adaptive:
    """How much leaner than planned a model trains. ``rungs`` are its sets of choices, the richest first.

    ``limit`` is the budget in bytes; less where others hold so much of the device that it cannot be had.
    """

    def __init__(self, model: nn.Module, meter: Meter, limit: int, rungs: int) -> None:
        self.meter, self.limit, self.rungs = meter, limit, rungs
        self.leaner, self.steps = 0, 0
        self.moves: list[Move] = []
        self._model = weakref.ref(model)
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, bool]()  # whether they are the model's
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        self._needs, self._step = LearnedPeaks(), _Step()
        self._ended = self._began = False
        self._batch: tuple[int, int] | None = None  # set and tokens of the forward since which peaks are counted
        self._base = self._after = 0  # bytes held before this accumulation, and after the last optimizer step
        self._free, self._most_room, self._last_room = limit, 0, 0
        self._retries = self._failures = 0
        self._fresh, self._given = True, -COOL  # whether the cache is small; the step after which it was given back
        self._torn = deque[int](maxlen=8)  # what the allocator held beyond what tensors did, lately
        self._broke = False  # whether there was an out-of-memory error
        self._calm, self._patience, self._returned = 0, PATIENCE, False
        self._told: set[tuple[int, int]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model goes by the batch alone: counters of a device cannot be told apart by model."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def remove(self) -> None:
        """Watch optimizers no longer. Idempotent."""
        self._hook.remove()

    def choose(self, planned: int, tokens: int | None, promised: bool) -> int:
        """The set for a forward that begins, of which the batch's own is ``planned``.

        ``promised``: the plan was made for batches of this size.
        """
        if not self._began:
            self._began = True
            self._survey()
            self.meter.reset(give_back=False)
        elif self._ended:
            self._ended = False
            self._look()
        else:
            self._note(last=False)
            self.meter.reset(give_back=False)
        chosen = self._choose(planned, tokens, promised)
        if self._less and tokens and not self._fits(chosen, tokens, False):  # its last chance: memory that is not torn
            self.meter.reset(give_back=True)
            self._fresh = True
        return chosen

    def _choose(self, planned: int, tokens: int | None, promised: bool) -> int:
        level = chosen = min(planned + self.leaner, self.rungs - 1)
        while tokens and chosen < self.rungs - 1 and not self._fits(chosen, tokens, promised and chosen == planned):
            chosen += 1
        if tokens and chosen > level and (planned, chosen) not in self._told:
            self._told.add((planned, chosen))
            why = f"a batch of {tokens:,} tokens might need more than the {format_binary(max(0, self._room))} free"
            self._tell(Move(self.steps, chosen - planned, why, tokens), logging.WARNING)
        return chosen

    def runs(self, number: int, tokens: int | None) -> None:
        """By which set the forward really goes: other ranks may have wanted a leaner one."""
        self._batch = (number, tokens or 0)
        self._step.sets[number] = max(self._step.sets.get(number, 0), tokens or 0)

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

    def _margin(self, known: bool) -> int:
        """Kept free beyond what tensors need: the allocator may not find its memory as it was, nor room in one piece
        for a batch that is not ``known``."""
        torn = max(self._torn, default=0)
        return torn + SEGMENT if self._less or not known else torn * self._broke

    def _fits(self, number: int, tokens: int, promised: bool) -> bool:
        """Whether a batch has room by a set, as memory was when this accumulation began."""
        needs, room = self._needs, self._room
        if needs.proven(number, tokens, room) or (promised and not self._less and not needs.seen(number, tokens)):
            return True
        takes, at_most = needs.of(number, tokens), needs.at_most(number, tokens)
        margin = self._margin(needs.seen(number, tokens))
        if takes is not None and takes + max(margin, (1 - PRESSED) * self._limit) <= room:
            return True
        if at_most is None:
            return not self._less
        return not needs.known(number) and at_most + margin <= room

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            model = self._model()
            ours = {id(p) for p in model.parameters()} if model is not None else set()
            self._optimizers[optimizer] = any(id(p) in ours for g in optimizer.param_groups for p in g["params"])
        if self._began and self._optimizers[optimizer]:
            self._note(last=True)  # what runs until the next forward, an evaluation say, is not training
            self._ended, self._after = True, self.meter.allocated()

    def _note(self, *, last: bool) -> None:
        """What the forward before this moment took, with its backward; ``last``: and with the optimizer's step.

        The first such step makes what optimizers keep, which no later one takes again.
        """
        reading, step = self.meter.read(), self._step
        retried = reading.retries > self._retries
        step.allocated, step.reserved = max(step.allocated, reading.allocated), max(step.reserved, reading.reserved)
        step.retried |= retried
        if reading.failures > self._failures:  # so much and no more could be had
            self._broke = True
            self._torn.append(max(0, self._limit - reading.allocated))
        elif retried or self._fresh:
            self._torn.append(max(0, reading.held - reading.allocated))
        if self._batch is not None and self._batch[1] and (self.steps or not last):
            self._needs.learn(*self._batch, max(0, reading.allocated - self._base), None if retried else self._room)
        self._retries, self._failures = reading.retries, reading.failures
        self._fresh, self._batch = False, None

    def _look(self) -> None:
        """An optimizer step has ended since the last forward: what did it take, and is another set better?"""
        self.steps += 1
        step, self._step = self._step, _Step()
        self._survey()
        limit = self._limit
        full = step.allocated + max(0, self._base - self._after) > limit * PRESSED
        over = step.reserved > limit  # what the cache holds since a richer set, or others let go of it, is no need
        taken = self._room < self._last_room * (1 - TAKEN)
        if self._told and self._room > self._last_room * (1 + TAKEN):
            self._told.clear()
            self._tell(Move(self.steps, self.leaner, f"{format_binary(self._room)} are free again"), logging.INFO)
        if taken or self._room > self._last_room:
            self._last_room = self._room
        if taken:
            self._told.clear()
            self._needs.forget_proofs()
        give_back = (taken or over) and self.steps - self._given >= COOL
        pressed = full or step.retried or (over and self._given == self.steps - 1)
        if pressed and self.leaner < self.rungs - 1 and min(step.sets, default=self.rungs) < self.rungs - 1:
            if self._returned:
                self._patience = min(MOST_PATIENCE, self._patience * 2)
            self._move(self.leaner + 1, _why(step, limit, self._base - self._after), logging.WARNING)
            give_back = True
        elif self.leaner and not pressed:
            self._try_back(step)
        if give_back:
            self._given, self._fresh = self.steps, True
        self.meter.reset(give_back=give_back)

    def _survey(self) -> None:
        """Look at what is held and free before an accumulation."""
        reading = self.meter.read()
        self._base, self._free = self.meter.allocated(), reading.free
        self._retries, self._failures = reading.retries, reading.failures
        if self.steps <= 1:  # what optimizers keep is there from the first step's end on
            self._most_room = self._last_room = self._room
        self._most_room = max(self._most_room, self._room)

    def _try_back(self, step: _Step) -> None:
        """Back by one after enough steps in which what the richer sets take would have had room."""
        takes = [self._needs.of(number - 1, tokens) for number, tokens in step.sets.items() if number and tokens]
        more = [self._base + round(each) + self._margin(True) for each in takes if each is not None]
        needs = max([step.allocated, *more])
        self._calm = self._calm + 1 if needs < self._limit * ROOM else 0
        if self._calm >= self._patience:
            room = f"{format_binary(self._limit - needs)} were free for {self._calm} steps"
            self._move(self.leaner - 1, room, logging.INFO)

    def _move(self, leaner: int, why: str, level: int) -> None:
        self._returned, self.leaner, self._calm = leaner < self.leaner, leaner, 0
        self._told.clear()
        self._tell(Move(self.steps, leaner, why), level)

    def _tell(self, move: Move, level: int) -> None:
        self.moves.append(move)
        _log.log(level, "%s", move)


def _why(step: _Step, limit: int, taken: int) -> str:
    held = f"{format_binary(step.allocated)} were held, {format_binary(step.reserved)} reserved"
    more = f" and {format_binary(taken)} taken since" if taken > 0 else ""
    torn = ", and its memory was so torn that the allocator had to give its cache back" if step.retried else ""
    return f"{held}{more} of {format_binary(limit)}{torn}"


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
