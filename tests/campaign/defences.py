"""Defences of the runtime that can be left out, to see how many pairs each catches.

``state``: nobody looks at what a unit reads and changes, nor puts it back. ``sentinels``: nothing is fingerprinted.
``recordings``: no call of ``remake`` that goes by a recipe is recorded again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autockpt.checkpointing import recorded_unit, unit
from autockpt.checkpointing.module_state import Entry, ModuleState
from autockpt.policies import replay
from autockpt.policies.rerun_state.reach import code_of
from autockpt.policies.rerun_state.state import Memory, UnitState

DEFENCES = ("state", "sentinels", "recordings")


class _Unwatched(UnitState):
    """What code may do is still known, as sentinels go by it."""

    def __init__(
        self, memory: Memory, module: nn.Module, objects: Sequence[Any], tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        if not any(memory.calls.values()):
            memory.code = code_of(memory.unit, module)
        memory.calls[module.training] += 1
        self.doubts, self.moved = [], {}
        self._still, self._quiet = [], None

    def after(self) -> None:
        pass

    @contextmanager
    def restored(self) -> Iterator[None]:
        yield


class _Unrestored(ModuleState):
    """What a forward changes is not learned."""

    def take(self) -> list[Entry]:
        return []

    def learn(self, before: dict[Any, Entry], *, late: int) -> list[Entry]:
        return []

    def learn_quiet(self, before: list[Entry]) -> list[Entry]:
        return []


def leave_out(names: Collection[str]) -> None:
    """Do without these in this process and in those that it forks."""
    if "state" in names:
        replay.UnitState = _Unwatched  # type: ignore[misc]
        unit.ModuleState = _Unrestored  # type: ignore[misc]
    if "sentinels" in names:
        os.environ["AUTOCKPT_SENTINELS"] = "off"
    if "recordings" in names:
        recorded_unit._GAP = sys.maxsize
