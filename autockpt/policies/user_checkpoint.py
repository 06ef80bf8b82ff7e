"""Units that the user's own code runs inside of ``torch.utils.checkpoint``: two owners of one activation.

What such a unit saves is dropped by that checkpoint, which runs it again in backward as plain training does, without
putting back what its forward has changed. To be bit for bit plain training the unit's choice stands aside.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from autockpt.checkpointing.fingerprint import fingerprint, form_of, why_not

hooks_in_force: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None]
hooks_in_force = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_FIRST_CALLS = 4


def inside_checkpoint() -> Literal["first", "again"] | None:
    """Whether a ``torch.utils.checkpoint`` (not the reentrant one, which sets gradients aside) is around what runs, and
    whether it runs for the first time."""
    hooks = hooks_in_force(False)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return None
    return "again" if hooks[0].__qualname__.startswith("_recomputation_hook") else "first"


class Passes:
    """What one unit gave for what, in its first calls inside of a checkpoint."""

    def __init__(self, unit: str) -> None:
        self._unit, self._calls, self._warned = unit, 0, False
        self._known: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
        warnings.warn(
            f"{unit} runs inside of a torch.utils.checkpoint, which drops what it saves and runs it again in backward: "
            "there its choice does nothing. Take the checkpoint away for the plan to act.",
            stacklevel=4,
        )

    def note(self, run: Literal["first", "again"], given: Any, output: Any) -> None:
        """The unit has run. Warns where it gives something else than the first time, as then not even plain training's
        gradients are those of its forward."""
        if self._warned or self._calls > _FIRST_CALLS or not (prints := _prints(given)):
            return
        if run == "first":
            self._calls += 1
            self._known[prints].add(_prints(output))
        elif prints in self._known and _prints(output) not in self._known[prints]:
            self._warned = True
            warnings.warn(
                f"{self._unit} gives something else when the torch.utils.checkpoint around it runs it again:"
                " its forward changes something that it reads, which that checkpoint does not put back. Plain training "
                "itself is inconsistent there, with or without the plan. Take the checkpoint away (a plan's recompute "
                "puts state back), or the change out of the forward.",
                stacklevel=4,
            )


def _prints(tree: Any) -> tuple[int, ...]:
    """Fingerprints of the tensors; empty where some have none, or kernels need not repeat themselves."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if any(why_not(t) is not None or not (t.is_cpu or torch.are_deterministic_algorithms_enabled()) for t in tensors):
        return ()
    return tuple(int(fingerprint(t, form_of(t))) for t in tensors)
