"""What is promised of odd programs: equal to plain training, or an error that names the unit.

State outside the unit's own modules is not promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from autockpt.errors import AutockptError
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, Choice, Remake, Segment, Selective
from tests.checkpointing import odd_programs as odd
from tests.policies.zoo import assert_equal

pytestmark = pytest.mark.slow

CHANGED = {change.__name__: change for change in odd.CHANGED}
RESTORED = ["counter", "made_at_first_use", "adding_to_a_list", "adding_to_a_dict"]
RESTORED += ["state_handed_on", "state_with_a_graph", "state_changed_in_place"]
each_choice = pytest.mark.parametrize("choice", [RECOMPUTE, Selective(), Segment(size=2), Remake(), OFFLOAD], ids=str)


def assert_equal_or_refused(
    choice: Choice, trained: Callable[[dict[str, Any]], dict[str, Tensor]], *units: str
) -> None:
    wanted = trained({})
    try:
        found = trained(dict.fromkeys(units, choice))
    except AutockptError as error:
        assert any(unit in str(error) for unit in units)
    else:
        assert_equal(found, wanted)


@each_choice
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_attributes_that_a_forward_changes(name: str, together: bool, choice: Choice) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        with attach(model := odd.two_units(CHANGED[name]), choices):
            return odd.steps(model, together=together)

    if name in RESTORED:
        assert_equal(trained({"0": choice, "1": choice}), trained({}))
    else:
        assert_equal_or_refused(choice, trained, "0", "1")


@each_choice
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", odd.OBJECTS)
def test_objects_that_a_forward_changes(name: str, given: bool, choice: Choice) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        with attach(model := odd.with_objects(name, given=given), choices):
            return odd.object_steps(model)

    assert_equal_or_refused(choice, trained, "layers.0", "layers.1")


@each_choice
@pytest.mark.parametrize("change", odd.REACHED)
def test_what_a_forward_reaches(change: Callable[[Any, Tensor], Tensor], choice: Choice) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        with attach(model := odd.reaching(change, odd.Config), choices):
            return odd.reaching_steps(model)

    assert_equal_or_refused(choice, trained, "layers.0", "layers.1")
