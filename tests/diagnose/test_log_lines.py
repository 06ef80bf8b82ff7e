"""What stands in front of every line, taken off."""

from __future__ import annotations

import pytest

from autockpt.diagnose.log_lines import rank_in, streams
from autockpt.diagnose.oom_log import read_text
from tests.diagnose.logs import BACKWARD, FORWARD, message
from tests.diagnose.origins import PREFIXES


@pytest.mark.parametrize("origin", PREFIXES)
@pytest.mark.parametrize(("stack", "stage"), [(FORWARD, "forward"), (BACKWARD, "backward")])
def test_a_stack_is_read_behind_any_prefix(origin: str, stack: str, stage: str) -> None:
    lines = f"step 3, loss 2.1\n{stack}{message()}".splitlines()
    (failure,) = read_text("\n".join(f"{PREFIXES[origin](i)}{line}" for i, line in enumerate(lines))).failures
    (bare,) = read_text("\n".join(lines)).failures
    assert failure.model_copy(update={"rank": None}) == bare and failure.place.stage == stage


def test_lines_of_other_processes_do_not_cut_a_stack() -> None:
    lines = (FORWARD + message()).splitlines()
    mixed = "\n".join(f"node-1: {line}\nnode-2: step {i}, loss 2.1" for i, line in enumerate(lines))
    assert read_text(mixed).failures == read_text("\n".join(lines)).failures


def test_prefixes_come_off_and_other_lines_stay() -> None:
    lines = ["a: Traceback (most recent call last):", 'a:   File "x.py", line 1, in f', "a:     g()", "b: step", "  c"]
    split = [stream.lines for stream in streams(lines)]
    assert split == [
        ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    g()"],
        ["b: step", "  c"],
    ]


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("2026-03-01 10:00:00 node-2: [default7]:", 7),
        ("[2026-03-01 10:00:00] [4]: ", 4),
        ("12: ", 12),
        (" 7: ", 7),
        ("Tue Mar  5 10:00:00 2024[2]<stderr>:", 2),
        ("[1,6]<stderr>: ", 6),
        ("node-3: ", None),
        ("192.168.0.6: ", None),
        ("(Worker pid=45464) ERROR 06-09 06:57:48 a.py:581] ", None),
    ],
)
def test_a_rank_is_read_where_a_prefix_names_one(prefix: str, rank: int | None) -> None:
    assert rank_in(prefix) == rank
