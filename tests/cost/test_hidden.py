from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from autockpt.cost.problem import NEARLY_FREE, hidden_copies
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Offload
from autockpt.solvers.problem import Option, Problem, UnitOptions

HOST = 100  # bytes of each unit


def problem(n: int, host_budget: int | None = None) -> Problem:
    options = (
        Option(choice=SAVE, seconds=0.0, kept=HOST, forward=0, backward=0),
        Option(choice=RECOMPUTE, seconds=1.0, kept=0, forward=0, backward=0),
        Option(choice=OFFLOAD, seconds=5.0, kept=0, forward=0, backward=0, host=HOST),
    )
    units = tuple(UnitOptions(name=f"u{i}", options=options) for i in range(n))
    return Problem(units=units, points=(), budget_bytes=0, host_budget=host_budget)


def windows(found: Problem) -> dict[int, int]:
    """The window of every unit whose copies are hidden."""
    return {
        i: option.choice.window
        for i, unit in enumerate(found.units)
        for option in unit.options
        if isinstance(option.choice, Offload) and option.seconds < 5.0
    }


def test_layers_that_take_half_as_long_as_their_copies() -> None:
    found = hidden_copies(problem(8), [1.0] * 8, HOST / 2)
    # copies of 0 take seconds 0 to 2, of 1 seconds 2 to 4, of 3 seconds 4 to 6, and of 5 those to 8
    assert windows(found) == {0: 1, 1: 2, 3: 2, 5: 2}
    assert [option.choice for option in found.units[1].options] == [SAVE, RECOMPUTE, Offload(window=2)]
    assert found.units[1].options[2].seconds == NEARLY_FREE * 5.0
    assert found.units[2] == problem(8).units[2]


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12), st.floats(0.1, 3.0), st.integers(0, 12))
def test_every_copy_is_over_when_its_window_ends(forwards: list[float], seconds: float, most: int) -> None:
    found = windows(hidden_copies(problem(len(forwards), most * HOST), forwards, HOST / seconds))
    ends = list(accumulate(forwards))
    free = 0.0
    for place, window in sorted(found.items()):
        free = max(free, ends[place] - forwards[place]) + seconds
        assert window >= 1 and ends[place + window] >= free - 1e-6
    assert len(found) <= most
