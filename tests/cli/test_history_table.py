from __future__ import annotations

import pytest

from autockpt.cli.history_table import print_table
from autockpt.cli.verify import print_report
from autockpt.schema import RECOMPUTE, VerifyReport
from autockpt.schema.verification import Check
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


def test_a_simulated_peak_is_shown_where_it_has_no_column_of_its_own() -> None:
    screen, raw = console(80)
    print_table([trial(0, measured=None), trial(1)], [], screen)
    lines = raw.getvalue().decode().splitlines()
    simulated, measured = (next(line for line in lines if line.split()[:1] == [n]) for n in "01")
    assert "~" in simulated and "iB" in simulated and "—" not in simulated and "~" not in measured


def test_a_verification_on_screen() -> None:
    checks = (
        Check(name="gradients", state="passed", detail="bit-equal to plain training at 4 × 256"),
        Check(name="peak", state="failed", detail="470 MiB measured, 441 MiB promised"),
        Check(name="step time", state="skipped", detail="no promise"),
    )
    held = (checks[0], checks[1].model_copy(update={"state": "passed"}))
    cases = (
        (checks, "does not keep"),
        (held, "keeps its promise"),
        (checks[:1], "no peak or step time was compared"),
        (checks[2:], "Nothing could"),
    )
    for kept, verdict in (*cases, (checks[2:], "Nothing could")):
        screen, raw = console()
        print_report(VerifyReport(checks=kept, notes=("a note",)), screen)
        text = raw.getvalue().decode()
        assert verdict in text and "a note" in text
    assert not VerifyReport(checks=checks).passed and VerifyReport(checks=checks[:1]).passed
