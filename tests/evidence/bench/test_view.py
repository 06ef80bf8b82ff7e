"""A bench as a page."""

from __future__ import annotations

from autockpt.schema import DeviceInfo, Environment, ResolvedBudget
from tests.evidence.bench.report import BenchLine, BenchReport, BenchRow, BudgetResult, Duel, Ratio, SearchCost
from tests.evidence.bench.view import bench_page

MIB = 2**20


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
    assert "first-k 2 at +20.0 %" in page and "0.940 [0.930, 0.950]" in page and "torch SAC ILP: needs pulp" in page
    assert "+4.0 % … +6.0 %" in page
