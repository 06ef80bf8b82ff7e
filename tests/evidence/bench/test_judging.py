"""What rounds of seconds say."""

from __future__ import annotations

import random

import pytest

from autockpt.schema import ResolvedBudget
from tests.evidence.bench.judging import fastest, lines_of, open_rows, paired, results_of
from tests.evidence.bench.report import BenchRow, Group

PEAKS = {"save everything": 100, "slow": 50, "quick": 60, "large": 90, "autockpt 60%": 58, "compiled 1": 80}
SECONDS = {"save everything": 1.0, "slow": 1.4, "quick": 1.2, "large": 1.05, "autockpt 60%": 1.1, "compiled 1": 0.5}


def row(key: str, **more: object) -> BenchRow:
    peer = key.split(" 60%")[0] if key.startswith("autockpt") else key
    group: Group = "compiled" if key.startswith("compiled") else "eager"
    more.setdefault("budget", "60%" if peer == "autockpt" else None)
    fields = {"state": "measured", "peak_bytes": PEAKS[key], "group": group} | more
    setting = {"budget": 1.0} if group == "compiled" else {}
    return BenchRow.model_validate({"key": key, "peer": peer, "setting": setting} | fields)


def rounds(number: int, noise: float = 0.002, seconds: dict[str, float] = SECONDS) -> list[dict[str, float]]:
    """Each round as a whole is slower or faster than the others by far more than methods differ."""
    draw = random.Random(1)
    made = []
    for _ in range(number):
        weather = draw.uniform(0.5, 2.0)
        made.append({key: s * weather * (1 + draw.gauss(0, noise)) for key, s in seconds.items()})
    return made


ROWS = [row(key) for key in PEAKS]
BUDGET = ResolvedBudget(asked="60%", bytes=60)


@pytest.mark.slow
def test_overheads_are_of_pairs_and_judged_within_the_group() -> None:
    lines = {line.row.key: line for line in lines_of(ROWS, rounds(12))}
    over = lines["quick"].overhead
    assert over is not None and over.high is not None and over.low < 1.2 < over.high and over.high - over.low < 0.02
    assert lines["save everything"].overhead is None and lines["compiled 1"].overhead is None
    assert lines["quick"].rounds == 12


def test_only_what_fits_takes_part_and_the_fastest_comes_first() -> None:
    (result,) = results_of(ROWS, rounds(12), [BUDGET], within=0.005)
    assert result.ours == "autockpt 60%"
    assert [d.rival for d in result.duels] == ["quick", "slow"]
    assert [d.verdict for d in result.duels] == ["faster", "faster"]
    assert result.compiled is None
    (wide,) = results_of(ROWS, rounds(12), [ResolvedBudget(asked="60%", bytes=100)], within=0.005)
    assert wide.compiled == "compiled 1" and wide.duels[0].rival == "save everything"
    assert wide.duels[0].verdict == "slower"


def test_a_plan_over_the_budget_is_not_ours_to_claim() -> None:
    rows = [row(key, **({"peak_bytes": 61} if key.startswith("autockpt") else {})) for key in PEAKS]
    (result,) = results_of(rows, rounds(12), [BUDGET], within=0.005)
    assert result.ours is None and "over the budget" in result.note and not result.duels


def test_compiled_plans_of_ours_are_judged_among_the_compiled() -> None:
    own = "autockpt compiled layers"
    compiled = BenchRow(key=f"{own} 60%", peer=own, group="compiled", state="measured", peak_bytes=55, budget="60%")
    lean = row("compiled 1", setting={"budget": 0.2}, peak_bytes=59).model_copy(update={"key": "compiled 0.2"})
    seconds = SECONDS | {compiled.key: 0.6, lean.key: 0.7}
    eager, ours = results_of([*ROWS, compiled, lean], rounds(12, seconds=seconds), [BUDGET], within=0.005)
    assert eager.peer == "autockpt" and eager.compiled == compiled.key
    assert not {compiled.key, lean.key} & {d.rival for d in eager.duels}
    assert ours.peer == own and ours.ours == compiled.key and ours.compiled is None
    assert [(d.rival, d.verdict) for d in ours.duels] == [("compiled 0.2", "faster")]


def test_failed_rows_are_no_rivals() -> None:
    rows = [row(key, **({"state": "failed"} if key == "quick" else {})) for key in PEAKS]
    (result,) = results_of(rows, rounds(12), [BUDGET], within=0.005)
    assert [d.rival for d in result.duels] == ["slow"]


@pytest.mark.parametrize(("noise", "most", "open_now"), [(0.0005, 60, False), (0.05, 60, True), (0.05, 12, False)])
def test_rounds_go_on_until_settled_or_the_limit(noise: float, most: int, open_now: bool) -> None:
    results = results_of(ROWS, rounds(12, noise), [BUDGET], within=0.005)
    keys = open_rows(results, most)
    assert bool(keys) == open_now
    assert not open_now or {"autockpt 60%", "quick"} <= set(keys)


def test_close_ones_are_undecided() -> None:
    near = SECONDS | {"quick": 1.1}
    (result,) = results_of(ROWS, rounds(12, 0.02, near), [BUDGET], within=0.005)
    assert result.duels[0].verdict == "undecided" and not result.duels[0].settled


def test_few_rounds_say_little() -> None:
    assert paired("quick", "slow", []) is None
    one = paired("quick", "slow", rounds(1))
    assert one is not None and one.high is None and one.rounds == 1
    (result,) = results_of(ROWS, rounds(1), [BUDGET], within=0.005)
    assert {d.verdict for d in result.duels} == {"undecided"}


def test_only_rounds_with_both_are_paired() -> None:
    apart = [{"quick": 1.0}, {"slow": 9.0}, {"quick": 1.0, "slow": 2.0}, {"quick": 1.1, "slow": 2.2}]
    ratio = paired("quick", "slow", apart)
    assert ratio is not None and ratio.rounds == 2 and ratio.value == pytest.approx(0.5)
    assert fastest(["quick", "slow"], apart) == "quick" and fastest([], apart) is None
