"""Tables on screens of any width: lines no longer than the screen, words and figures whole, nothing lost."""

import pytest
from rich.table import Table

from autockpt import terminal as style
from autockpt.terminal import plain_table
from tests.samples import printed

ROWS = (
    ("*", "recompute all", "yes", "10.1 MiB\n~10.1 MiB", "12.5 ms ±13.2 %", "everything is run again in backward"),
    ("", "recompute_offload", "no", "1,001 MiB", "12.5 ms ±3.2 %", "its input leaves the device"),
    ("", "none", "OOM", "—"),  # a short row
)


def table() -> Table:
    made = plain_table("", "plan", "fits", ">peak", ">step", "<what it does")
    for row in ROWS:
        made.add_row(*row)
    return made


@pytest.mark.parametrize("columns", ["0", "1"])
def test_an_unknown_width_is_not_taken_for_one(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert style.console(stderr=False).width == style.console(stderr=True).width == 120


def test_nothing_is_lost_at_any_width() -> None:
    letters = sorted("".join(cell for row in ROWS for cell in row).replace(" ", "").replace("\n", ""))
    for width in range(40, 140):
        text = printed(lambda screen: screen.print(table()), width=width)
        assert all(len(line) <= width for line in text.splitlines()), width
        body = text[text.rindex("─") + 1 :]
        assert sorted("".join(body.split())) == letters, width


def test_results_in_a_notebook_are_text_in_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as its kernel does
    results = style.console(stderr=False)
    assert not results.is_jupyter and not results.is_terminal and results.color_system is None
    assert style.console(stderr=True).is_jupyter, "a bar moves there as before"
