"""segment: consecutive units are recomputed together, and only the input of the first is kept (Chen et al. 2016,
arXiv:1604.06174; as PyTorch's ``checkpoint_sequential``, but no parent's forward has to be rewritten for it)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torch import nn

from autockpt.checkpointing.segment import SegmentCalls, SegmentFrame
from autockpt.policies.base import PlannedUnit, Session
from autockpt.policies.compiling import outside_graphs
from autockpt.policies.conflicts import refuse_modules
from autockpt.policies.recompute import RecomputeState, run_recomputed
from autockpt.schema.choices import Segment


def attach_segment(unit: PlannedUnit, session: Session) -> None:
    assert isinstance(unit.choice, Segment)
    refuse_modules(unit.module, unit.name)
    before = reversed(session.order[: session.order.index(unit)])
    neighbours = itertools.takewhile(lambda other: other.choice == unit.choice, before)
    if sum(1 for _ in neighbours) % unit.choice.size == 0:  # else it belongs to the segment that was begun last
        session.listeners.append(SegmentCalls())
    calls: Any = session.listeners[-1]
    session.place(unit.module, run_in_segment, RecomputeState(unit.name, functools.partial(SegmentFrame, calls)))


# Not even the unit's inside is compiled: what runs again must be what ran, and backward is outside of every graph.
@outside_graphs("segment", "runs several units again in backward", inside=True)
def run_in_segment(module: nn.Module, state: RecomputeState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped and recomputed with its segment.

    Raises what ``recompute`` raises.
    """
    return run_recomputed(module, state, *args, **kwargs)
