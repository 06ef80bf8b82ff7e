"""segment: several consecutive units are one region, of which only what enters it is kept (Chen et al. 2016,
arXiv:1604.06174; PyTorch's ``checkpoint_sequential``, without the parent's forward being written for it)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from autockpt.checkpointing.segment import SegmentCalls, SegmentFrame
from autockpt.policies.base import PlannedUnit, Session
from autockpt.policies.compiling import outside_graphs
from autockpt.policies.conflicts import refuse_modules
from autockpt.policies.recompute import RecomputeState, run_recomputed
from autockpt.schema.choices import Segment


def attach_segment(unit: PlannedUnit, session: Session) -> None:
    refuse_modules(unit.module, unit.name)
    members = next(members for members in _segments(session.order) if unit in members)
    if unit is members[0]:
        session.listeners.append(SegmentCalls())
    calls: Any = session.listeners[-1]  # units are attached in order: those of the segment that was begun last
    session.place(unit.module, run_in_segment, RecomputeState(unit.name, functools.partial(SegmentFrame, calls)))


def _segments(order: Sequence[PlannedUnit]) -> Iterator[list[PlannedUnit]]:
    """Neighbours with the same segment choice, in parts of its size."""
    for choice, run in itertools.groupby(order, key=lambda unit: unit.choice):
        if isinstance(choice, Segment):
            members = list(run)
            for start in range(0, len(members), choice.size):
                yield members[start : start + choice.size]


# Not even the unit's inside is compiled: what runs again must be what ran, and backward is outside of every graph.
@outside_graphs("segment", "runs several units again in backward", inside=True)
def run_in_segment(module: nn.Module, state: RecomputeState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped and recomputed with its segment.

    Raises what ``recompute`` raises.
    """
    return run_recomputed(module, state, *args, **kwargs)
