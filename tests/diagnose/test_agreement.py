"""Whether a simulated step fails where the run did, in words."""

from __future__ import annotations

import pytest

from autockpt.diagnose.agreement import _compared
from autockpt.schema.diagnosis import Stage


@pytest.mark.parametrize(
    ("simulated", "reported", "said"),
    [
        ("forward", "forward", "They agree."),
        ("forward", "loss", "came further"),
        ("loss", "backward", "recomputes layers"),
        ("backward", "forward", "failed earlier"),
        ("recompute", "forward", "do not agree"),
        ("loss", "optimizer", "no optimizer states yet"),
    ],
)
def test_a_run_that_failed_elsewhere_came_further_or_less_far(simulated: Stage, reported: Stage, said: str) -> None:
    assert said in _compared(simulated, reported)
