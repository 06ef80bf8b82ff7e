"""A choice's ``gathered``: FSDP2 keeps the weights of a unit from its forward to its backward.

It gathers them once less and takes their memory meanwhile: ``fully_shard(reshard_after_forward=False)``, for one layer.
FSDP2 asks after each forward what to do, so an attachment answers before it: for forwards with gradients alone, as
weights that no backward frees would stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner


class GatheredState(Attachment):
    """``groups`` are FSDP2's groups of weights inside the unit, each with its state: they are afterwards as without it.

    Those that stay gathered already, as ``fully_shard`` or a unit around this one has it, are left alone.
    """

    def __init__(self, unit: str, groups: Sequence[tuple[Any, Any]]) -> None:
        super().__init__(unit)
        freed = [(group, state) for group, state in groups if group.post_forward_mesh_info is not None]
        self._before = [(group, state, group.post_forward_mesh_info) for group, state in freed]

    def switch(self, on: bool) -> None:
        """Have the weights stay gathered after a forward, or not if they would not without this.

        A compiled forward does not ask again: there weights stay without gradients, too.
        """
        for group, state, before in self._before:
            # weights of FSDP2's roots stay by default, and which these are it finds in the first forward
            root = state._is_root and state._auto_reshard_after_forward
            group.post_forward_mesh_info = None if on or root else before


def keep_gathered(unit: PlannedUnit, session: Session) -> None:
    """Let FSDP2 keep the unit's weights until its backward. Raises ConflictError where it does not shard the unit."""
    from torch.distributed.fsdp import FSDPModule

    groups: list[tuple[Any, Any]] = []
    for module in unit.module.modules():
        if isinstance(module, FSDPModule):
            # private: torch sets what these do, and cannot be asked for it; a list of them not before torch 2.12
            state = module._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            groups += [(group, state) for group in found if group is not None]  # None: all its weights are in others
    if not groups:
        raise ConflictError(
            f"`gathered` cannot be carried out on {unit.name}, which FSDP2 does not shard by itself",
            remedy="Call fully_shard on it before the plan is applied; or leave `gathered` out.",
        )
    session.place(unit.module, run_gathered, GatheredState(unit.name, groups))


def run_gathered(module: nn.Module, state: GatheredState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward, after which FSDP2 keeps what it gathered if there will be a backward."""
    if state.active and not torch.compiler.is_compiling():
        state.switch(torch.is_grad_enabled())
    return call_inner(module, state, args, kwargs)
