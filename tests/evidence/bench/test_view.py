"""A bench as table, page and picture."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from autockpt.analysis.draw import Axis
from autockpt.schema import DeviceInfo, Environment, ResolvedBudget
from tests.evidence.bench.picture import bench_picture
from tests.evidence.bench.report import BenchLine, BenchReport, BenchRow, BudgetResult, Duel, Ratio, SearchCost
from tests.evidence.bench.view import bench_page, print_bench

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def line(key: str, peer: str, peak: int, seconds: float, over: float | None = None, **more: object) -> BenchLine:
    row = BenchRow.model_validate(
        {"key": key, "peer": peer, "state": "measured", "peak_bytes": peak, "gradients": "bit-equal"} | more
    )
    ratio = Ratio(low=over - 0.01, value=over, high=over + 0.01, rounds=9) if over else None
    return BenchLine(row=row, rounds=9, step_seconds=seconds, noise=0.01, overhead=ratio)


def sample() -> BenchReport:
    device = DeviceInfo(kind="cpu", name="A <processor>", capacity_bytes=2**34, threads=1)
    duel = Duel(
        rival="first-k 2", ratio=Ratio(low=0.93, value=0.94, high=0.95, rounds=9), verdict="faster", settled=False
    )
    cost = SearchCost(trials=7, seconds=61.0, measured_seconds=50.0)
    lines = (
        line("save everything", "save everything", 400 * MIB, 1.0),
        line("first-k 1", "first-k", 300 * MIB, 1.05, 1.05),
        line("first-k 2", "first-k", 200 * MIB, 1.2, 1.2),
        BenchLine(row=BenchRow(key="torch SAC ILP", peer="torch SAC ILP", state="missing", message="needs pulp")),
        line("torch.compile 1", "torch.compile", 250 * MIB, 0.9, group="compiled", gradients="equal with plain"),
        BenchLine(
            row=BenchRow(key="autockpt 10%", peer="autockpt", state="infeasible", message="nothing fits 40.0 MiB")
        ),
        line("autockpt 60%", "autockpt", 190 * MIB, 1.13, 1.13, budget="60%", search=cost),
    )
    result = BudgetResult(
        budget=ResolvedBudget(asked="60%", bytes=240 * MIB), ours="autockpt 60%", duels=(duel,), compiled=None
    )
    return BenchReport(
        model="llama",
        settings={"batch_size": 8},
        environment=Environment(device=device, versions={"torch": "2.13.0"}),
        command="python -m tests.evidence.bench --model llama",
        plain_peak_bytes=400 * MIB,
        lines=lines,
        budgets=(result, BudgetResult(budget=ResolvedBudget(asked="10%", bytes=40 * MIB), note="no plan of ours")),
    )


def printed(report: BenchReport, width: int = 120) -> str:
    buffer = io.StringIO()
    print_bench(report, Console(file=buffer, width=width, highlight=False))
    return buffer.getvalue()


def test_the_screen_says_who_is_ahead_and_how_surely() -> None:
    text = " ".join(printed(sample()).split())
    assert "autockpt +13.0 %; fastest other that fits: first-k 2 at +20.0 %" in text
    assert "0.940 [0.930, 0.950], faster (interval still wider than asked for after 9 rounds)" in text
    assert "10% (40.0 MiB): no plan of ours." in text
    assert "torch SAC ILP: needs pulp" in text and "not here" in text
    assert "autockpt 10% — — nothing fits" in text and "autockpt 10%: nothing fits 40.0 MiB" in text
    assert "7 trials in 61.0 s, 50.0 s of them measured steps" in text
    assert "gradients bit-equal with plain training's: 4 rows" in text


def test_an_interrupted_bench_says_so() -> None:
    assert "Interrupted" in printed(sample().model_copy(update={"interrupted": True}))


def test_the_table_fits_eighty_columns() -> None:
    assert max(map(len, printed(sample(), 80).splitlines())) <= 80


def test_the_page_has_machine_versions_command_and_every_row() -> None:
    page = bench_page(sample())
    for wanted in (
        "A <processor>, 1 thread",
        "torch 2.13.0",
        "    python -m tests.evidence.bench --model llama",
        "±1.0 %",
    ):
        assert wanted in page
    assert page.count("| first-k 2 |") == 2, "as a row and as a rival"
    assert "+4.0 % … +6.0 %" in page


def test_two_of_ours_at_one_budget_are_told_apart() -> None:
    report = sample()
    page = bench_page(report)
    assert "\n| 60% | first-k 2 | 0.940" in page
    other = report.budgets[0].model_copy(update={"peer": "autockpt compiled model"})
    page = bench_page(report.model_copy(update={"budgets": (*report.budgets, other)}))
    assert "\n| 60%, autockpt | first-k 2 |" in page and "\n| 60%, autockpt compiled model | first-k 2 |" in page


def test_the_picture_is_one_line_per_method_with_budget_lines() -> None:
    root = ET.fromstring(bench_picture(sample()))
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert "first-k 1: 300 MiB, 1.05 s" in titles and "autockpt 60%: 190 MiB, 1.13 s" in titles
    assert not any("SAC" in title for title in titles), "what was not measured is not drawn"
    assert len(list(root.iter(f"{SVG}polyline"))) == 1, "single points need no line"
    texts = [t.text or "" for t in root.iter(f"{SVG}text")]
    assert "60%" in texts and "10%" not in texts, "a budget outside of what is drawn has no line"
    assert "torch.compile (compiled)" in texts


def test_a_picture_of_nothing_is_one_all_the_same() -> None:
    empty = sample().model_copy(update={"lines": ()})
    assert "nothing was timed yet" in bench_picture(empty)
    alone = sample().model_copy(update={"lines": sample().lines[:1]})
    ET.fromstring(bench_picture(alone))


@pytest.mark.parametrize(("low", "high", "unit"), [(0.1, 0.4, 1.0), (90 * MIB, 380 * MIB, float(MIB)), (3, 3, 1.0)])
def test_ticks_are_round_and_inside(low: float, high: float, unit: float) -> None:
    axis = Axis([low, high], 0, 100)
    ticks = axis.ticks(unit)
    assert 2 <= len(ticks) <= 12 and all(axis.inside(t) for t in ticks)


@pytest.mark.parametrize("noise", [0.4, 1.0])
def test_wide_intervals_stay_inside_the_frame(noise: float) -> None:
    lines = tuple(line.model_copy(update={"noise": noise}) for line in sample().lines)
    root = ET.fromstring(bench_picture(sample().model_copy(update={"lines": lines})))
    ends = [float(shape.get(end, "0")) for shape in root.iter(f"{SVG}line") for end in ("y1", "y2")]
    assert ends and all(0 <= end <= 520 for end in ends)


def test_noise_that_says_nothing_is_called_unknown() -> None:
    lines = tuple(line.model_copy(update={"noise": 1.0}) for line in sample().lines)
    assert "is unknown in the middle case" in " ".join(printed(sample().model_copy(update={"lines": lines})).split())
