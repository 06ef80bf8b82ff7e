"""Defences of the runtime that can be left out, to see how many pairs each catches.

``state``: nobody looks at what a unit reads and changes, nor puts it back. ``sentinels``: nothing is fingerprinted.
``recordings``: no call of ``remake`` that goes by a recipe is recorded again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from autockpt.checkpointing import recorded_unit, unit
from autockpt.checkpointing.module_state import Entry, ModuleState

DEFENCES = ("state", "sentinels", "recordings")


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
        unit.ModuleState = _Unrestored  # type: ignore[misc]
    if "sentinels" in names:
        os.environ["AUTOCKPT_SENTINELS"] = "off"
    if "recordings" in names:
        recorded_unit._GAP = sys.maxsize
