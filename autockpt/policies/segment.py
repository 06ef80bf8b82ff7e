"""segment: several consecutive units are one region, of which only what enters it is kept (Chen et al. 2016,
arXiv:1604.06174; PyTorch's ``checkpoint_sequential``, without the parent's forward being written for it)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import nn

from autockpt.policies.attachment import acts, call_plainly
from autockpt.policies.base import PlannedUnit, Policy, PolicySession
from autockpt.policies.compiling import outside_graphs
from autockpt.policies.conflicts import refuse_modules, refuse_native
from autockpt.policies.kvcache import without_cache
from autockpt.policies.recompute import RecomputePolicy
from autockpt.policies.region import Region
from autockpt.policies.replay import Replay, ReplayState
from autockpt.schema.choices import Choice, Segment


class SegmentState(ReplayState):
    """A unit's attachment: its region, and its place in it."""

    def __init__(self, unit: str, region: Region, position: int) -> None:
        super().__init__(unit)
        self.region, self.position = region, position


class SegmentPolicy(Policy):
    kind: ClassVar[str] = "segment"

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        unseen = bool(units) and session.written_to_by_others()
        for members in _segments(session.order):
            choice = members[0].choice
            assert isinstance(choice, Segment)
            region = Region(len(members), choice.levels, unseen)
            session.listeners.append(region)
            for position, unit in enumerate(members):
                refuse_modules(unit.module, unit.name)
                session.place(unit.name, unit.module, run_in_segment, SegmentState(unit.name, region, position))
                session.attached[unit.name] = _words(members, region)

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        # the last unit stops as soon as all is there that backward needs; two levels run all others once more
        levels = choice.levels if isinstance(choice, Segment) else 1
        least, most = RecomputePolicy().reruns(choice, forward)
        return least, levels * most


def _segments(order: Sequence[PlannedUnit]) -> Iterator[list[PlannedUnit]]:
    """Neighbours with the same segment choice, in parts of its size."""
    for choice, run in itertools.groupby(order, key=lambda unit: unit.choice):
        if isinstance(choice, Segment):
            members = list(run)
            for start in range(0, len(members), choice.size):
                yield members[start : start + choice.size]


def _words(members: Sequence[PlannedUnit], region: Region) -> str:
    if len(members) == 1:
        return "segment: alone in it; its inputs are kept, its forward runs again in backward"
    if region.unseen:
        return "segment: by itself, as the model may write unseen (.data, NumPy) to what passes between units"
    how = "run again together in backward" if region.levels == 1 else "run again in backward, then one by one"
    return f"segment: {len(members)} units from {members[0].name} to {members[-1].name} {how}"


# Not even the unit's inside is compiled: what runs again must be what ran, and backward is outside of every graph.
@outside_graphs("segment", "runs several units again in backward", inside=True)
def run_in_segment(module: nn.Module, state: SegmentState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped and made again with its segment.

    Raises ConflictError where the forward cannot be run twice (inputs changed in place, some KV caches). In backward
    ConflictError where a unit does not do again what it did, InPlaceError where something that it read was changed.
    """
    if not acts(state):
        return call_plainly(module, state, args, kwargs)
    refuse_native(module, state.unit)
    args, kwargs = without_cache(module, state.unit, args, kwargs)
    return state.region.run(state.position, Replay(module, state, args, kwargs))
