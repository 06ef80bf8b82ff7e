from __future__ import annotations

import pytest

from autockpt.cli.history_table import print_table
from autockpt.schema import RECOMPUTE
from tests.samples import console, trial


@pytest.mark.parametrize("width", [80, 120])
def test_trials_and_their_front(width: int) -> None:
    trials = [
        trial(0, encoding="baseline", name="recompute all"),
        trial(1),
        trial(2, state="out_of_memory", feasible=False, measured=None),
        trial(4, feasible=False, state="over_budget"),
    ]
    screen, raw = console(width)
    print_table(trials, [trials[1]], screen)
    print_table([trial(5, choices={f"h.{i}": RECOMPUTE for i in range(100)})], [], screen)
    text = raw.getvalue().decode()
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in text
    assert next(line for line in lines if line.startswith("*")).split()[1] == "1"
    assert "recompute all" in text and "OOM" in text and "R×100" in text
    assert "....ORRRRRRR" in text and trials[0].plan_hash[:8] in text and "Pareto" in text


def test_a_simulated_peak_is_shown_without_a_column() -> None:
    screen, raw = console(80)
    print_table([trial(0, measured=None), trial(1)], [], screen)
    lines = raw.getvalue().decode().splitlines()
    simulated, measured = (next(line for line in lines if line.split()[:1] == [n]) for n in "01")
    assert "~" in simulated and "iB" in simulated and "—" not in simulated and "~" not in measured
