"""The divergence checks (sentinels) of a session, and a report of what they compared."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autockpt.checkpointing.divergence import FIRST_CALLS, LONGEST, DivergenceCheck, Mode, UnitProof
from autockpt.errors import UsageError

VARIABLE = "AUTOCKPT_SENTINELS"
MODES: tuple[Mode, ...] = ("off", "sample", "all")


@dataclass(frozen=True)
class Proof:
    """What sentinels have checked so far. ``print`` shows it.

    A step is a forward pass of the whole model with gradients enabled; with gradient accumulation an optimizer step has
    several. Every unit's first two calls are checked, with ``sample`` then ever fewer, at last one of 512;
    with ``all`` every call.
    ``unwatched``: units of the plan that no sentinel stands over, and why.
    """

    mode: Mode
    steps: int
    units: dict[str, UnitProof]
    unwatched: dict[str, str]

    @property
    def checks(self) -> int:
        """Calls proven right, of all units."""
        return sum(unit.checks for unit in self.units.values())

    @property
    def tensors(self) -> int:
        """Tensors compared, of all units."""
        return sum(unit.tensors for unit in self.units.values())

    def __str__(self) -> str:
        if self.mode == "off":
            return f"sentinels are off ({VARIABLE}, sentinels= of apply)"
        proven = sum(1 for unit in self.units.values() if unit.checks)
        some = f"{FIRST_CALLS} first calls, then ever fewer, at least one in {LONGEST + 1}"
        often = "every call" if self.mode == "all" else some
        lines = [
            f"sentinels ({often}): in {self.steps} forward passes {self.tensors} tensors in {self.checks} calls of "
            f"{proven} of {len(self.units)} units were what forward had computed"
        ]
        for name, unit in self.units.items():
            lines += [f"  {name}: {times} × not checked: {why}" for why, times in unit.unchecked.items()]
            if not unit.checks:
                lines.append(f"  {name}: not checked yet (no backward went through it, or it is compiled)")
        return "\n".join([*lines, *(f"  {name}: not checked: {why}" for name, why in self.unwatched.items())])


def sentinels_of(mode: str | None) -> DivergenceCheck:
    """The check of one session: of ``mode``, else of ``AUTOCKPT_SENTINELS``, else ``sample``. Raises UsageError."""
    source = "sentinels" if mode is not None else VARIABLE
    asked = mode if mode is not None else os.environ.get(VARIABLE, "").strip() or "sample"
    if asked in MODES:
        return DivergenceCheck(asked)
    raise UsageError(f"{source} is {asked!r}", remedy=f"Set {source} to {', '.join(MODES[:-1])} or {MODES[-1]}.")
