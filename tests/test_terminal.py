"""Tables on screens of any width: lines no longer than the screen, words and figures whole, nothing lost."""

from __future__ import annotations

import pytest
from rich.table import Table

from autockpt import terminal as style
from autockpt.terminal import plain_table
from tests.samples import console

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


def printed(width: int) -> str:
    screen, raw = console(width)
    screen.print(table())
    screen.file.flush()
    return raw.getvalue().decode()


def test_nothing_is_lost_or_broken_at_any_width() -> None:
    words = {word for row in ROWS for cell in row for word in cell.split()} | {"fits", "peak", "what"}
    for width in range(24, 140):
        text = printed(width)
        assert all(len(line) <= width for line in text.splitlines()), width
        assert words <= {word.rstrip(",") for word in text.split()}, width


def test_a_figure_stays_with_its_unit_in_a_table() -> None:
    for width in range(24, 140):
        text = printed(width)
        if "──" in text:
            assert "1,001 MiB" in text and "±13.2 %" in text and "12.5 ms" in text, width


def test_where_a_line_does_not_hold_the_words_each_row_is_a_paragraph() -> None:
    lines = [line.rstrip() for line in printed(50).splitlines()]
    assert lines[:2] == ["* recompute all", "  fits yes, peak 10.1 MiB ~10.1 MiB,"]
    assert "recompute_offload" in lines and lines[-1] == "  fits OOM, peak —"


def test_a_paragraph_breaks_between_figures_where_it_can() -> None:
    for width in range(24, 60):
        text = printed(width)
        assert "──" in text or ("peak 1,001 MiB," in text and "step 12.5 ms ±3.2 %," in text), width


def test_a_table_is_as_before_on_another_screen() -> None:
    made, (narrow, _), (wide, raw) = table(), console(60), console(140)
    narrow.print(made)
    wide.print(made)
    wide.file.flush()
    assert raw.getvalue().decode() == printed(140)


def test_results_in_a_notebook_are_text_in_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as its kernel does
    results = style.console(stderr=False)
    assert not results.is_jupyter and not results.is_terminal and results.color_system is None
    assert style.console(stderr=True).is_jupyter, "a bar moves there as before"


def test_no_cell_is_cut_where_a_table_is_wider_than_the_screen() -> None:
    out, raw = console(30)
    table = plain_table("shape", "bytes", "name")
    table.add_row("4x1536x8192 bf16", "1.50 GiB", "model.layers.0-15")
    out.print(table)
    lines = [line.rstrip() for line in raw.getvalue().decode().splitlines()]
    assert max(map(len, lines)) <= 30
    assert " ".join(" ".join(lines).split()) == "4x1536x8192 bf16 bytes 1.50 GiB, name model.layers.0-15"
