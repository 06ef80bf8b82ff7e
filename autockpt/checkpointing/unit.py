"""What all calls of one checkpointed unit have in common: its modules and parameters, what its forwards change, and
which calls are checked."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autockpt.checkpointing.divergence import FIRST_CALLS, Schedule, UnitCheck
from autockpt.checkpointing.module_state import ModuleState

_MOST_FORMS = 4096


class CheckpointedUnit:
    """A module whose calls are checkpointed, as its modules are now.

    ``check`` compares what they recompute. ``first_calls`` is less than ``FIRST_CALLS`` where a step is measured as one
    in the middle of training.
    """

    def __init__(
        self, name: str, module: nn.Module, check: UnitCheck | None = None, first_calls: int = FIRST_CALLS
    ) -> None:
        self.name, self.module, self.check = name, module, check
        self.state = ModuleState(name, module)
        self.draws_in_python = False
        self.forms: dict[Any, Any] = {}  # of saved tensors; equal ones are one object
        self.learned: dict[Any, Any] = {}  # by what a call is given, for frames that learn more from calls
        modules = self.state.modules
        self._first_calls = first_calls
        self._schedules: dict[Any, Schedule] = {}
        named = ((m._parameters, name, p) for m in modules for name, p in m._parameters.items())
        self._homes: list[tuple[dict[str, Any], str]] = [(home, name) for home, name, p in named if p is not None]
        self._modules = [m._modules for m in modules]
        self._children = self._children_now()
        # FullyShardedDataParallel takes parameters away and puts views of its own in their place
        self._whole = [m._parameters for m in modules if "_is_fsdp_managed_module" not in vars(m)]
        self._sharded = [vars(m) for m in modules if "_is_fsdp_managed_module" in vars(m)]
        self._sizes = list(map(len, self._whole))

    @property
    def is_measured(self) -> bool:
        """Whether calls are measured as ones in the middle of training."""
        return self._first_calls < FIRST_CALLS

    def renewed(self) -> CheckpointedUnit:
        """The same unit with the modules of now."""
        return CheckpointedUnit(self.name, self.module, self.check, self._first_calls)

    def in_mid_training(self) -> None:
        """Check one more call only."""
        self._first_calls, self._schedules = 1, {}

    def next_call(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """A call with these inputs begins. As ``Schedule.next``.

        Calls are of one kind where types, gradients and modes are alike. Sizes do not count: batches without padding
        have a new length in each step.
        """
        if len(self.forms) > _MOST_FORMS:  # batches without padding have new ones in every step
            self.forms.clear()
        kind = (self.module.training, *[(t.dtype, t.requires_grad) for t in tensors])
        if (schedule := self._schedules.get(kind)) is None:
            schedule = self._schedules[kind] = Schedule(self._first_calls)
        return schedule.next()

    def has_same_modules(self) -> bool:
        """Whether no module was exchanged, and no module or parameter added or taken away, since this was made."""
        return self._children_now() == self._children and list(map(len, self._whole)) == self._sizes

    def _children_now(self) -> list[nn.Module | None]:
        return [*itertools.chain.from_iterable(map(dict.values, self._modules))]

    def parameters(self) -> list[torch.Tensor | None]:
        """As they are now: FSDP, ``functional_call`` and PEFT exchange them, and FSDP takes some away."""
        return [home.get(name) for home, name in self._homes]

    @contextmanager
    def with_parameters(self, before: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Inside, other values are in the place of parameters, as ``functional_call`` put them."""
        exchanged: list[tuple[dict[str, Any], str, Any]] = []
        for (home, name), then in zip(self._homes, before, strict=True):
            if (now := home.get(name)) is not then and holds_other_values(then, now):
                exchanged.append((home, name, now))
                home[name] = then
        try:
            yield
        finally:
            for home, name, now in exchanged:
                home[name] = now

    def is_in_pieces(self, before: Sequence[torch.Tensor | None]) -> bool:
        """Whether FSDP2 (another type), or FullyShardedDataParallel with original parameters, has taken a parameter
        apart that the forward had as a whole."""
        now = self.parameters()
        return not all(map(operator.is_, before, now)) and any(map(_taken_apart, before, now))

    def lost_memory(self) -> bool:
        """Whether the views that FullyShardedDataParallel puts in the place of parameters have lost their memory."""
        if not self._sharded:
            return False
        views = (value for fields in self._sharded for value in fields.values() if type(value) is torch.Tensor)
        plain = (view for view in views if view.numel() and view.layout is torch.strided)
        return any(not view.untyped_storage().nbytes() for view in plain)


def _taken_apart(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if before is now:
        return False
    return (hasattr(now, "to_local") and not hasattr(before, "to_local")) or hasattr(now, "_fsdp_flattened")


def holds_other_values(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    """Whether other values stand in a parameter's place. FSDP and accelerate exchange objects for the same values.

    So does PEFT's DoRA on the CPU: each forward puts another object over the same packed, frozen weight.
    """
    if before is now or before is None or now is None or before.is_meta or now.is_meta:
        return False
    packed = type(now).__name__ in ("Params4bit", "Int8Params") and not now.requires_grad
    if packed and type(before) is type(now) and before.data_ptr() == now.data_ptr() and before.shape == now.shape:
        return False
    return not (hasattr(before, "to_local") or hasattr(now, "to_local"))
