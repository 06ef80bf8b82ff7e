import io
import threading
from typing import Any

from rich.console import Console

from autockpt.progress import BarListener, LineListener, listener
from autockpt.schema import Trial
from tests.samples import console, trial


def test_elsewhere_there_is_a_line_per_trial() -> None:
    said: list[str] = []
    with LineListener(said.append, lambda: 2.0 * len(said)) as lines:
        lines.stage("trace")
        lines.stage("search", 3)
        lines.trial(trial(0), trial(0))
        lines.trial(trial(1, state="out_of_memory", feasible=False, measured=None), trial(0))
        lines.advance()
        lines.note("a note")
    text = "\n".join(said)
    assert len(said) == 5 and lines.trials == 2 and "[   4.0 s] trial   0  margin 0.02" in text
    assert "448 ms ±0.8 %, 441 MiB  fits  best so far" in text and "~451 ms, 441 MiB  out of memory" in text


class Made(LineListener):
    """On a clock that the test moves."""

    def __init__(self, **how: Any) -> None:
        self.said, self.now = list[str](), 0.0
        super().__init__(self.said.append, lambda: self.now, **how)


def test_a_silent_stage_reports_ever_less_often() -> None:
    lines = Made()
    lines.pulse()
    lines.stage("trace")
    for lines.now in range(1, 40):
        lines.pulse()
    lines.stage("finals", 4)
    lines.advance()
    lines.now += 6
    lines.pulse()
    assert [line.partition("] ")[2] for line in lines.said] == [
        "trace …",
        "trace: 5.00 s so far",
        "trace: 15.0 s so far",
        "trace: 35.0 s so far",
        "finals …",
        "finals: 1 of 4, about 3 s left",
    ]


def test_a_brief_one_reports_long_stages_alone() -> None:
    lines = Made(quiet=60.0, brief=True)
    lines.stage("search", 4)
    lines.trial(trial(0), trial(0))
    for lines.now in range(1, 100):
        lines.pulse()
    (line,) = lines.said
    assert "search: 1 of 4, about" in line and line.endswith("best 448 ms ±0.8 %, 441 MiB")


def test_its_thread_ends_with_the_block() -> None:
    before = threading.active_count()
    with LineListener(lambda line: None) as lines:
        lines.stage("trace")
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_trial_says_what_is_left_of_a_long_stage() -> None:
    lines = Made()
    lines.stage("baselines", 2)
    for number, lines.now in enumerate((6.0, 9.0)):
        lines.trial(trial(number), trial(0))
    assert lines.said[1].endswith("(1 of 2, about 6 s left)") and "left" not in lines.said[2]


def test_a_terminal_gets_a_bar_and_a_pipe_lines() -> None:
    assert isinstance(listener(console()[0]), LineListener)
    file = io.StringIO()
    screen = Console(file=file, width=100, force_terminal=True)
    watcher = listener(screen)
    assert isinstance(watcher, BarListener)
    best: Trial = trial(0)
    with watcher:
        watcher.advance()
        watcher.stage("profile")
        watcher.stage("search", 5)
        watcher.trial(best, None)
        watcher.trial(best, best)
        watcher.note("a note")
    text = file.getvalue()
    assert "a note" in text and "search" in text and "best 448 ms" in text
