"""Which calls are checked, and whether a unit's modules are still those of the forward."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from autockpt.checkpointing.divergence import FIRST_CALLS, LONGEST, Schedule
from autockpt.checkpointing.unit import CheckpointedUnit, put_back


def checked(first: int, calls: int) -> list[int]:
    schedule = Schedule(first)
    return [call for call in range(1, calls + 1) if schedule.next() is not None]


def test_first_calls_are_checked_and_later_ones_ever_less():
    found = checked(FIRST_CALLS, 4000)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert found[:2] == [1, 2] and gaps == sorted(gaps) and max(gaps) <= LONGEST + 1 and len(found) < 20


def test_in_mid_training_one_call_is_checked():
    assert checked(1, 2) == [1]


def test_the_number_of_unchecked_calls_is_known():
    schedule = Schedule(FIRST_CALLS)
    found = [late for _ in range(9) if (late := schedule.next()) is not None]
    assert found[:2] == [0, 0] and all(found[2:])


def test_types_tell_kinds_of_calls_apart_and_sizes_do_not():
    unit = CheckpointedUnit("unit", nn.Linear(2, 2))
    kind = unit.kind_of([torch.ones(2)])
    assert unit.kind_of([torch.ones(3)]) is kind and kind.places == []
    assert unit.kind_of([torch.ones(2, dtype=torch.float64)]) is not kind
    unit.module.eval()
    assert unit.kind_of([torch.ones(2)]) is not kind


def test_modules_are_told_by_identity():
    block = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    unit = CheckpointedUnit("unit", block)
    assert unit.has_same_modules()
    inner = block[1]
    block[1] = nn.Sequential(*inner.children())
    assert not unit.has_same_modules()
    block[1] = inner
    assert unit.has_same_modules()
    block[0].register_parameter("scale", nn.Parameter(torch.ones(2)))
    assert not unit.has_same_modules() and unit.renewed().has_same_modules()


def test_exchanged_parameters_are_put_back_and_undone():
    module = nn.Linear(2, 2)
    unit, before = CheckpointedUnit("unit", module), list(module.parameters())
    module.weight = now = nn.Parameter(torch.zeros(2, 2))
    with put_back(unit.exchanged(before)):
        assert module.weight is before[0]
    assert module.weight is now and not unit.exchanged([now, module.bias])
