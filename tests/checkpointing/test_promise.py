"""What is promised of odd programs: equal to plain training, or an error that names the unit.

State outside the unit's own modules is not promised.
"""

import functools

import pytest
from torch import Tensor

from autockpt.errors import AutockptError
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, Choice, Remake, Segment, Selective
from tests.checkpointing.odd_programs import PROGRAMS, RESTORED, steps
from tests.policies.zoo import assert_equal, on

pytestmark = pytest.mark.slow


@functools.cache
def trained(name: str, chosen: Choice | None = None) -> dict[str, Tensor]:
    with attach(model := PROGRAMS[name](), on(("units.0", "units.1"), chosen)):
        return steps(model)


@pytest.mark.parametrize("choice", [RECOMPUTE, Selective(), Segment(size=2), Remake(), OFFLOAD], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_are_right_or_refused(name: str, choice: Choice) -> None:
    wanted = trained(name)
    try:
        assert_equal(trained(name, choice), wanted)
    except AutockptError as error:
        assert "units." in str(error) and name not in [change.__name__ for change in RESTORED]
