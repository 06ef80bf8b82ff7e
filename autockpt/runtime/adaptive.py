"""Going by the real peak: leaner choices before a budget would break, back when there is room.

Moves are made between optimizer steps alone. A straight line through what a set of choices took for a batch says what
it would take for a longer one, which then goes by a leaner set itself.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autockpt.schema.choices import RECOMPUTE, Choice
from autockpt.schema.names import ancestors, outermost
from autockpt.schema.sizes import format_binary

_log = logging.getLogger("autockpt")

PRESSED, ROOM = 0.95, 0.90
"""Shares of the limit: from the first on a leaner set is taken; a richer one has to stay below the second."""
PATIENCE, MOST_PATIENCE = 20, 640
"""Optimizer steps with room before a richer set is tried again; twice as many each time that it had to be given up."""
COOL = 5  # optimizer steps at least between two times that the cache is given back
_RICHER = ("save", "remake", "selective", "keep_attention")


class Reading(NamedTuple):
    """The most bytes since the last reset that tensors held and that the allocator did; how often the allocator had to
    give its cache back to serve a request; and bytes of the device that nobody holds."""

    allocated: int
    reserved: int
    retries: int
    free: int


class Meter(Protocol):
    """A device's own count of its memory, in bytes."""

    def read(self) -> Reading: ...

    def allocated(self) -> int:
        """What tensors hold now."""
        ...

    def reset(self, *, give_back: bool) -> None:
        """Count peaks from now on; ``give_back``: return cached memory to the device first."""
        ...


class AcceleratorMeter:
    """The counters of PyTorch's caching allocator for one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> Reading:
        stats = torch.accelerator.memory_stats(self.device)
        free, _ = torch.accelerator.get_memory_info(self.device)
        cached = stats.get("reserved_bytes.all.current", 0)
        return Reading(
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
            free + cached,
        )

    def allocated(self) -> int:
        return torch.accelerator.memory_allocated(self.device)

    def reset(self, *, give_back: bool) -> None:
        if give_back:
            torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self.device)


class Move(NamedTuple):
    """A change to leaner choices, or back: after which optimizer step, by how many sets, and why."""

    step: int
    leaner: int
    why: str

    def __str__(self) -> str:
        return f"after optimizer step {self.step}: {self.why}; now {self.leaner} leaner than the batch's own set"


def meter_of(device: torch.device) -> Meter | None:
    """What tells a device's memory while training; None where nothing does, as on a CPU."""
    if device.type == "cpu" or device.type == "meta":
        return None
    try:
        torch.accelerator.memory_stats(device)
        torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):
        return None
    return AcceleratorMeter(device)


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
        self._ended = self._began = False
        self._base, self._retries, self._given = 0, 0, 0
        self._tokens: dict[int, int] = {}
        self._per_token: dict[int, tuple[float, int]] = {}  # bytes a token by set, and the tokens that showed it
        self._calm, self._patience, self._returned = 0, PATIENCE, False
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model goes by the batch alone: counters of a device cannot be told apart by model."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def remove(self) -> None:
        """Watch optimizers no longer. Idempotent."""
        self._hook.remove()

    def choose(self, planned: int, tokens: int | None) -> int:
        """The set for a forward that begins, of which the batch's own is ``planned``."""
        if self._ended:
            self._ended = False
            self._look()
        if not self._began:
            self._began = True
            reading = self.meter.read()
            self._retries = reading.retries
            self.meter.reset(give_back=False)
            self._base = self.meter.allocated()
        chosen = min(planned + self.leaner, self.rungs - 1)
        while tokens is not None and chosen < self.rungs - 1 and self._would_break(chosen, tokens):
            chosen += 1
        self._tokens[chosen] = max(self._tokens.get(chosen, 0), tokens or 0)
        return chosen

    def _would_break(self, number: int, tokens: int) -> bool:
        """Whether a batch that is longer than any before would be too much for a set, on a straight line."""
        known = self._per_token.get(number)
        if known is None or tokens <= known[1]:
            return False
        return self.meter.allocated() + known[0] * tokens > self.limit * PRESSED

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            model = self._model()
            ours = {id(p) for p in model.parameters()} if model is not None else set()
            self._optimizers[optimizer] = any(id(p) in ours for g in optimizer.param_groups for p in g["params"])
        self._ended |= self._began and self._optimizers[optimizer]

    def _look(self) -> None:
        """An optimizer step has ended since the last forward: what did it take, and is another set better?"""
        self.steps += 1
        reading = self.meter.read()
        limit = min(self.limit, reading.free)
        self._learn(reading)
        retried = reading.retries > self._retries
        pressed = reading.allocated > limit * PRESSED or reading.reserved > limit or retried
        if pressed and self.leaner < self.rungs - 1 and min(self._tokens, default=self.rungs) < self.rungs - 1:
            if self._returned:
                self._patience = min(MOST_PATIENCE, self._patience * 2)
            self._move(self.leaner + 1, _why(reading, limit, retried), logging.WARNING)
            self.meter.reset(give_back=True)
            self._given = self.steps
        else:
            if self.leaner and not pressed:
                self._try_back(reading, limit)
            # what lies in the cache since others let go of it, or since a richer set, is no need of this one
            idle = reading.reserved > limit and self.steps - self._given >= COOL
            self._given = self.steps if idle else self._given
            self.meter.reset(give_back=idle)
        self._retries, self._base, self._tokens = reading.retries, self.meter.allocated(), {}

    def _learn(self, reading: Reading) -> None:
        if len(self._tokens) == 1:
            ((number, tokens),) = self._tokens.items()
            if tokens:
                per_token, seen = self._per_token.get(number, (0.0, 0))
                here = max(0, reading.allocated - self._base) / tokens
                self._per_token[number] = max(per_token, here), max(seen, tokens)

    def _try_back(self, reading: Reading, limit: int) -> None:
        """Back by one after enough steps in which what the richer set takes besides would have had room."""
        richer = min(self._tokens, default=self.leaner) - 1
        tokens = max(self._tokens.values(), default=0)
        known = self._per_token.get(richer)
        needs = reading.allocated if known is None else max(reading.allocated, self._base + round(known[0] * tokens))
        self._calm = self._calm + 1 if needs < limit * ROOM else 0
        if self._calm >= self._patience:
            room = f"{format_binary(limit - needs)} were free for {self._calm} steps"
            self._move(self.leaner - 1, room, logging.INFO)

    def _move(self, leaner: int, why: str, level: int) -> None:
        self._returned, self.leaner, self._calm = leaner < self.leaner, leaner, 0
        self.moves.append(Move(self.steps, leaner, why))
        _log.log(level, "%s", self.moves[-1])


def _why(reading: Reading, limit: int, retried: bool) -> str:
    held = f"{format_binary(reading.allocated)} were held, {format_binary(reading.reserved)} reserved"
    torn = ", and its memory was so torn that the allocator had to give its cache back" if retried else ""
    return f"{held} of {format_binary(limit)}{torn}"


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
