"""What the calls of a unit have taught: by the forms of what a call is given, the recipe that it can go by.

The first calls of a signature are recorded; later ones go by the recipe that they gave (``recorded_call``). After ever
longer gaps one is recorded besides and compared with it. So a unit that began to do something else, and saves tensors
of the same forms nevertheless, is found at the latest in the call after ``LONGEST`` others. Where two recordings of a
signature differ before a call has gone by either, more of them must agree; where that goes on, every call is recorded.

Batches without padding have a new length in each step. Once a unit is known to be steady, one recording of a new length
is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autockpt.checkpointing.divergence import FIRST_CALLS, Schedule
from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.recipes import Recipe, difference
from autockpt.checkpointing.replay_context import autocast_is_on, switches
from autockpt.checkpointing.unit import CheckpointedUnit
from autockpt.errors import RerunMismatch

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_GAP = 4
"""Calls that go by a recipe before one is recorded again, for the first time."""
_MISSES = 3
"""So often may calls of a kind turn out to do something else; from then on each is recorded."""
_MOST = 64
"""Signatures of a unit whose recipes are known at a time."""
_EXACT = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
_NUMBERS = (bool, int, float, str)


class _Kind:
    """Calls that differ in sizes and numbers alone. ``is_steady``: two recordings of one signature were the same."""

    def __init__(self, first_calls: int) -> None:
        self.schedule = Schedule(first_calls, _GAP)
        self.is_steady = first_calls < FIRST_CALLS
        self.misses = 0

    def must_record(self, known: Signature) -> bool:
        """Whether too few recordings of a signature agree for a call to go by the recipe."""
        needed = 1 if self.is_steady and not self.misses else FIRST_CALLS * 4**self.misses
        return known.recipe is None or self.misses >= _MISSES or known.agreed < needed


class Signature:
    """Calls of one signature. So many recordings in a row ``agreed`` on the ``recipe``, and so many calls have
    ``followed`` it since the last one."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.recipe: Recipe | None = None
        self.agreed = self.followed = 0


class RecordedUnit:
    """A module whose calls go by recipes, as its modules are now.

    ``watching`` gives a dispatch mode that hands ops to a recorder. ``keeps``: expensive ops that are not to run again.
    ``scopes`` names modules inside for which that is so (``keep``), or in which alone ops run again (``within``).
    ``compares``: calls that go by a recipe are recorded again now and then.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        watching: Callable[[OpRecorder], AbstractContextManager[Any]],
        keeps: Callable[[Any], bool] = lambda _: False,
        scopes: Mapping[nn.Module, str] | None = None,
        first_calls: int = FIRST_CALLS,
        *,
        compares: bool = True,
    ) -> None:
        self.name, self.watching, self.keeps, self.scopes = name, watching, keeps, scopes or {}
        self.everywhere = "within" not in self.scopes.values()
        self.unit = CheckpointedUnit(name, module)
        self.modules = modules = self.unit.state.modules
        fields = [vars(m) for m in modules]
        places = [(home, n) for m in modules for home in (m._parameters, m._buffers) for n in home]
        # FullyShardedDataParallel puts views of its own in the place of parameters
        places += [(home, n) for home in fields for n, value in home.items() if isinstance(value, torch.Tensor)]
        self.weights: list[tuple[dict[str, Any], str]] = places
        # A scale that is changed from step to step is an argument of an op. No saved tensor's form shows it.
        self._numbers = [(home, n) for home in fields for n, value in home.items() if type(value) in _NUMBERS]
        self._first_calls, self._compares = first_calls, compares
        self._kinds: dict[Any, _Kind] = {}
        self.signatures: dict[Any, Signature] = {}
        self._switches: list[list[Any]] = []

    def in_mid_training(self) -> None:
        """Record one more call only."""
        self._first_calls, self._kinds, self.signatures = 1, {}, {}

    def next_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Signature, list[torch.Tensor], bool]:
        """A call begins: its signature, the tensors that it is given, and whether it is to be recorded."""
        tensors: list[torch.Tensor] = []
        key = self._key(args, kwargs, tensors)
        known = self.signatures.get(key)
        if known is None:
            key_of_kind = self.modules[0].training, *[(t.dtype, t.requires_grad) for t in tensors]
            if (kind := self._kinds.get(key_of_kind)) is None:
                kind = self._kinds[key_of_kind] = _Kind(self._first_calls)
            known = Signature(kind)
            if key is not None:
                if len(self.signatures) >= _MOST:
                    del self.signatures[next(iter(self.signatures))]
                self.signatures[key] = known
        is_due = known.kind.schedule.next() is not None and self._compares
        return known, tensors, is_due or known.kind.must_record(known)

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Equal for calls of which one's recipe may hold for the other; None where nothing tells that."""
        rest = _plain_parts(args, tensors), _plain_parts(dict(kwargs), tensors) if kwargs else None
        cast: Any = None
        if autocast_is_on():
            kinds = sorted({tensor.device.type for tensor in tensors})
            states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
            cast = torch.is_autocast_cache_enabled(), *states
        try:
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
            shared: list[Any] = []
            if len(set(storages)) < len(storages):
                shared = [(storages.index(s), t.storage_offset()) for s, t in zip(storages, tensors, strict=True)]
            forms = [(t.shape, t.stride(), t.dtype, t.requires_grad, t.is_leaf, t.device, type(t)) for t in tensors]
            key = rest, cast, _function_modes(), self._kernels(), self.numbers(), *shared, *forms
            hash(key)
        except (RuntimeError, TypeError):  # sparse and the like have no storage, and jagged sizes no hash
            return None
        return key

    def _kernels(self) -> int:
        """Which of the sets of switches met so far is in force: they are no keys of a dictionary."""
        if (now := switches()) not in self._switches:
            self._switches.append(now)
        return self._switches.index(now)

    def numbers(self) -> tuple[Any, ...]:
        """Numbers and flags among the modules' attributes, as they are now."""
        return tuple([home.get(name) for home, name in self._numbers])

    def leave_out_changed(self, before: tuple[Any, ...]) -> None:
        """A forward has ended that began with these numbers: such as it changed, as a counter, tell no calls apart."""
        if before != (now := self.numbers()):
            triples = zip(self._numbers, before, now, strict=True)
            self._numbers = [place for place, then, here in triples if then == here]
            self.signatures.clear()

    def learn(self, known: Signature, recipe: Recipe) -> None:
        """A call was recorded. Raises RerunMismatch where calls since the last recording went by another recipe."""
        before, followed = known.recipe, known.followed
        known.recipe, known.followed = recipe, 0
        if before is None or before.content == recipe.content:
            known.recipe = before or recipe  # one object for all calls
            known.agreed += 1
            known.kind.is_steady |= known.agreed >= FIRST_CALLS
        else:
            known.kind.misses, known.agreed = known.kind.misses + 1, 1
            # calls that saved tensors of other forms have not followed it
            if followed and before.forms == recipe.forms:
                known.recipe = None
                raise RerunMismatch(
                    f"{self.name} has changed within the last {followed} calls what it does: "
                    f"{difference(recipe, before)}. What backward made again in these calls may be wrong",
                    remedy=f"Use `recompute` or `save` on {self.name}: a number, a flag or a tensor that its forward "
                    "reads from outside of its modules is not what it was. Go back to a checkpoint from before.",
                )
        if recipe.is_dynamic:  # its Python may go by values
            known.kind.misses = _MISSES

    def lose(self, known: Signature) -> None:
        """A call that went by the recipe has saved something else."""
        known.kind.misses += 1
        known.recipe, known.agreed, known.followed = None, 0, 0


def _plain_parts(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What tells one call's arguments from another's besides their tensors, which are appended to the list."""
    kind = type(value)
    if kind in _EXACT:
        return value
    if issubclass(kind, torch.Tensor):
        tensors.append(value)
        return None
    if kind is tuple or kind is list:
        return kind, *[_plain_parts(part, tensors) for part in value]
    if kind is dict:
        return kind, *[(key, _plain_parts(part, tensors)) for key, part in value.items()]
    return kind
