from __future__ import annotations

import pytest

from autockpt.reporting.area import ASCII, BLOCKS, resampled, sparkline
from autockpt.reporting.style import plain_table
from autockpt.reporting.trace_view import print_ops, print_summary, summarise
from tests.reporting.samples import console, small_graph


def printed(width: int = 80, encoding: str = "utf-8") -> str:
    screen, raw = console(width, encoding)
    print_summary(summarise(small_graph()), {"model": "tiny", "packed": False, "batch_size": 2}, screen)
    return raw.getvalue().decode(encoding)


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == BLOCKS
    assert sparkline([6.9, 7], 0, 7) == "▇█", "the highest level is the peak's alone"
    assert sparkline([3, 3], 3, 3) == "▁▁"
    assert resampled([1, 9, 2, 3], 2) == [1, 3]
    assert resampled([1, 2], 4) == [0, 0, 1, 1]
    assert resampled([], 2) == []


@pytest.mark.parametrize("width", [80, 120])
def test_a_trace_on_screen(width: int) -> None:
    text = printed(width)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in text
    assert "model tiny, batch size 2" in text and "packed" not in text
    row = next(line for line in lines if line.startswith("h.0-1 "))
    shown = ["h.0-1", "×2", *(["Block"] if width > 100 else []), "150", "B", "10", "B", "110", "FLOP", "95.7", "%"]
    assert row.split() == shown and next(line for line in lines if line.startswith("  .mlp"))
    assert "Peak 2.17 KiB (2.22 KB) at op 11: aten.mm.default, backward in h.1.attn" in text
    assert "gradients 900 B" in text and "held by h.1: 1.03 KiB" in text and "experts are assumed balanced" in text


def test_the_peak_is_marked_under_the_line() -> None:
    lines = printed().splitlines()
    at = next(i for i, line in enumerate(lines) if "█" in line)
    assert lines[at + 1].startswith("|forward") and "|backward" in lines[at + 1] and "|opt" in lines[at + 1]
    mark = lines[at + 2].index("^")
    assert lines[at][mark] == "█"


def test_poor_encodings_get_plain_characters() -> None:
    text = printed(encoding="cp1252")
    assert "█" not in text and ASCII[-1] in text


def test_ops_are_tab_separated() -> None:
    screen, raw = console(20)
    print_ops(small_graph(), screen)
    lines = raw.getvalue().decode().splitlines()
    assert len(lines) == 1 + len(small_graph().ops)
    assert lines[1].split("\t") == ["0", "forward", "aten.mm.default", "embed", "uint8[10]", "10", "0", "1010"]


def test_no_cell_is_cut_where_a_table_is_wider_than_the_screen() -> None:
    out, raw = console(30)
    table = plain_table("shape", "bytes", "name")
    table.add_row("4x1536x8192 bf16", "1.50 GiB", "model.layers.0-15")
    out.print(table)
    lines = [line.rstrip() for line in raw.getvalue().decode().splitlines()]
    assert max(map(len, lines)) <= 30
    assert " ".join(" ".join(lines).split()) == "4x1536x8192 bf16 bytes 1.50 GiB, name model.layers.0-15"
