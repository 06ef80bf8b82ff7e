"""What `recompute` and `selective` promise of odd programs: equal to plain training, or an error that names the unit.

State outside the unit's own modules is not promised: ``ELSEWHERE`` lists what changes such state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from autockpt.errors import AutockptError
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, Choice, Selective
from tests.policies import test_rerun_state as attributes
from tests.policies import test_rerun_state_objects as objects
from tests.policies import test_rerun_state_reached as reached
from tests.policies.zoo import assert_equal

pytestmark = pytest.mark.slow

ATTRIBUTES = {change.__name__: change for change in attributes.CHANGES}
RESTORED = ["counter", "made_at_first_use", "adding_to_a_list", "adding_to_a_dict"]
RESTORED += ["state_handed_on", "state_with_a_graph", "state_changed_in_place"]
each_choice = pytest.mark.parametrize("choice", [RECOMPUTE, Selective()], ids=str)
ELSEWHERE = {reached.hook_on_a_node, reached.a_norm_of_another_unit, reached.a_count_in_a_configuration}


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
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_that_a_forward_changes(name: str, together: bool, choice: Choice) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        with attach(model := attributes.make(ATTRIBUTES[name]), choices):
            return attributes.run(model, together=together)

    if name in RESTORED:
        assert_equal(trained({"0": choice, "1": choice}), trained({}))
    else:
        assert_equal_or_refused(choice, trained, "0", "1")


@each_choice
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", objects.OBJECTS)
def test_objects_that_a_forward_changes(name: str, given: bool, choice: Choice) -> None:
    assert_equal_or_refused(
        choice,
        lambda choices: objects.trained(lambda: objects.Model(name, given=given), choices.get("layers.0")),
        *("layers.0", "layers.1"),
    )


@each_choice
@pytest.mark.parametrize("change", [change for change in reached.CHANGES if change not in ELSEWHERE])
def test_what_a_forward_reaches(change: Callable[[Any, Tensor], Tensor], choice: Choice) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        with attach(model := reached.make(change, reached.Config), choices):
            return reached.run(model)

    assert_equal_or_refused(choice, trained, "layers.0", "layers.1")
