from __future__ import annotations

import pytest

from autockpt.cli.verify import print_report
from autockpt.schema.verification import Check, CheckState, VerifyReport
from tests.samples import console

GRADIENTS = Check(name="gradients", state="passed", detail="equal bit for bit")


def report(state: CheckState = "passed") -> VerifyReport:
    return VerifyReport(checks=(GRADIENTS, Check(name="step time", state=state)), notes=("a note",))


def test_a_report_as_text_is_the_table_of_the_command_line() -> None:
    screen, raw = console()
    print_report(report("failed"), screen)
    shown = [line.rstrip() for line in raw.getvalue().decode().splitlines()]
    assert shown == str(report("failed")).splitlines() and len(shown) == 4


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("passed", "The plan keeps its promise."),
        ("failed", "The plan does not keep its promise: step time."),
        ("skipped", "No check failed; no peak or step time was compared with the plan's."),
    ],
)
def test_the_verdict_follows_from_the_checks(state: CheckState, said: str) -> None:
    assert report(state).verdict == said


def test_nothing_checked_is_no_verdict() -> None:
    assert VerifyReport(checks=()).verdict == "Nothing could be checked."
