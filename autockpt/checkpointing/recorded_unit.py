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
from typing import Any, ClassVar

import torch
from torch import nn

from autockpt.checkpointing.divergence import FIRST_CALLS
from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.recipes import Recipe, difference
from autockpt.checkpointing.replay_context import autocast_is_on, switches
from autockpt.checkpointing.unit import CallKind, CheckpointedUnit
from autockpt.errors import RerunMismatch

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_MISSES = 3
"""So often may calls of a kind turn out to do something else; from then on each is recorded."""
_MOST = 64
"""Signatures of a unit whose recipes are known at a time."""
_EXACT = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
_NUMBERS = (bool, int, float, str)


class Signature:
    """Calls of one signature. So many recordings in a row ``agreed`` on the ``recipe``, and so many calls have
    ``followed`` it since the last one."""

    def __init__(self, kind: CallKind) -> None:
        self.kind = kind
        self.recipe: Recipe | None = None
        self.agreed = self.followed = 0


class RecordedUnit(CheckpointedUnit):
    """A module whose calls go by recipes, as its modules are now.

    ``watching`` gives a dispatch mode that hands ops to a recorder. ``keeps``: expensive ops that are not to run again.
    ``scopes`` names modules inside for which that is so (``keep``), or in which alone ops run again (``within``).
    ``compares``: calls that go by a recipe are recorded again now and then.
    """

    gap: ClassVar[int] = 4  # calls that go by a recipe before one is recorded again

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
        super().__init__(name, module, None, first_calls)
        self.watching, self.keeps, self.scopes = watching, keeps, scopes or {}
        self.everywhere = "within" not in self.scopes.values()
        self.modules = modules = self.state.modules
        fields = [vars(m) for m in modules]
        places = [(home, n) for m in modules for home in (m._parameters, m._buffers) for n in home]
        # FullyShardedDataParallel puts views of its own in the place of parameters
        places += [(home, n) for home in fields for n, value in home.items() if isinstance(value, torch.Tensor)]
        self.weights: list[tuple[dict[str, Any], str]] = places
        # A scale that is changed from step to step is an argument of an op. No saved tensor's form shows it.
        self._numbers = [(home, n) for home in fields for n, value in home.items() if type(value) in _NUMBERS]
        self._compares = compares
        self.signatures: dict[Any, Signature] = {}

    def in_mid_training(self) -> None:
        """Record one more call only."""
        super().in_mid_training()
        self.signatures = {}

    def next_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Signature, list[torch.Tensor], bool]:
        """A call begins: its signature, the tensors that it is given, and whether it is to be recorded."""
        tensors: list[torch.Tensor] = []
        rest = _plain_parts(args, tensors), _plain_parts(kwargs, tensors)
        key: Any = None
        try:
            key = *rest, self.numbers(), switches(), *_surroundings(tensors)
            known = self.signatures.get(key)
        except (RuntimeError, TypeError):  # sparse and the like have no storage, and jagged sizes no hash
            key = known = None
        if known is None:
            known = self._new_signature(key, tensors)
        is_due = known.kind.schedule.next() is not None and self._compares
        return known, tensors, is_due or self._must_record(known)

    def _must_record(self, known: Signature) -> bool:
        """Whether too few recordings of a signature agree for a call to go by the recipe."""
        kind = known.kind
        is_steady = (kind.is_steady or self.is_measured) and not kind.misses
        needed = 1 if is_steady else FIRST_CALLS * 4**kind.misses
        return known.recipe is None or kind.misses >= _MISSES or known.agreed < needed

    def _new_signature(self, key: Any, tensors: list[torch.Tensor]) -> Signature:
        known = Signature(self.kind_of(tensors))
        if key is not None:  # without one nothing tells whether another call's recipe holds
            if len(self.signatures) >= _MOST:
                del self.signatures[next(iter(self.signatures))]
            self.signatures[key] = known
        return known

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


def _surroundings(tensors: list[torch.Tensor]) -> list[Any]:
    """What tensors a call is given, which of them share memory, and which modes are around it."""
    parts: list[Any] = [_function_modes()]
    if autocast_is_on():
        kinds = sorted({tensor.device.type for tensor in tensors})
        parts += [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        parts.append(torch.is_autocast_cache_enabled())
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    if len(set(storages)) < len(storages):
        parts += [(storages.index(s), t.storage_offset()) for s, t in zip(storages, tensors, strict=True)]
    return parts + [(t.shape, t.stride(), t.dtype, t.requires_grad, t.is_leaf, t.device, type(t)) for t in tensors]


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
