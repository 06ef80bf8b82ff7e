"""What the rounds say: step times, overheads, and who is ahead at a budget. Numbers in, numbers out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from autockpt.measuring.statistics import Interval, judge, noise, ratio_interval
from autockpt.schema import ResolvedBudget, words
from tests.evidence.bench.peers import OUR_OWN, OURS, PEERS, PLAIN
from tests.evidence.bench.report import BenchLine, BenchRow, BudgetResult, Duel, Group, Ratio

Rounds = Sequence[Mapping[str, float]]


def lines_of(rows: Iterable[BenchRow], rounds: Rounds) -> list[BenchLine]:
    """Every row with its median, noise and overhead over plain training of its group."""
    rows = list(rows)
    bases = {group: base_of(rows, group) for group in ("eager", "compiled")}
    return [_line(row, bases[row.group], rounds) for row in rows]


def base_of(rows: Iterable[BenchRow], group: Group) -> BenchRow | None:
    """Plain training of a group: saving everything, or what the compiler does by itself."""
    measured = [row for row in rows if row.state == "measured" and row.group == group]
    if group == "eager":
        return next((row for row in measured if row.peer == PLAIN), None)
    return next((row for row in measured if row.setting.get("budget") == 1.0), None)


def _line(row: BenchRow, base: BenchRow | None, rounds: Rounds) -> BenchLine:
    times = [seconds[row.key] for seconds in rounds if row.key in seconds]
    if row.state != "measured" or not times:
        return BenchLine(row=row)
    overhead = paired(row.key, base.key, rounds) if base is not None and base.key != row.key else None
    return BenchLine(
        row=row,
        rounds=len(times),
        step_seconds=statistics.median(times),
        noise=noise(times),
        overhead=overhead,
    )


def paired(ours: str, base: str, rounds: Rounds) -> Ratio | None:
    """The ratio of two rows' times from the rounds that have both; None where there are none."""
    both = [(seconds[ours], seconds[base]) for seconds in rounds if ours in seconds and base in seconds]
    if not both:
        return None
    interval = ratio_interval([a for a, _ in both], [b for _, b in both])
    high = interval.high if math.isfinite(interval.high) else None
    return Ratio(low=interval.low, value=interval.value, high=high, rounds=len(both))


def results_of(
    rows: Iterable[BenchRow], rounds: Rounds, budgets: Sequence[ResolvedBudget], within: float
) -> list[BudgetResult]:
    """Who is ahead at every budget: each of our own ways that has rows against the others of its group."""
    rows = list(rows)
    own = [name for name in OUR_OWN if any(row.peer == name for row in rows)] or [OURS]
    return [_result(name, rows, rounds, budget, within) for budget in budgets for name in own]


def _result(own: str, rows: Sequence[BenchRow], rounds: Rounds, budget: ResolvedBudget, within: float) -> BudgetResult:
    group = PEERS[own].group
    measured = [row for row in rows if row.state == "measured" and row.peak_bytes is not None]
    fitting = [row for row in measured if row.peak_bytes is not None and row.peak_bytes <= budget.bytes]
    compiled = fastest([row.key for row in fitting if row.group == "compiled"], rounds) if group == "eager" else None
    found = [row for row in rows if row.peer == own and row.budget == budget.asked]
    ours = next((row for row in found if row in fitting), None)
    rivals = [row.key for row in fitting if row.group == group and row.peer not in OUR_OWN]
    if ours is None:
        note = f"{_missing(found)}; {words.counted(len(rivals), 'other')} {'fits' if len(rivals) == 1 else 'fit'}"
        return BudgetResult(budget=budget, peer=own, compiled=compiled, note=note)
    ratios = {rival: ratio for rival in rivals if (ratio := paired(ours.key, rival, rounds)) is not None}
    # against the fastest of them our own ratio is largest
    order = sorted(ratios, key=lambda rival: -ratios[rival].value)
    duels = tuple(_duel(key, ratios[key], within) for key in order)
    note = "" if rivals else f"no other {group} method fits"
    return BudgetResult(budget=budget, peer=own, ours=ours.key, duels=duels, compiled=compiled, note=note)


def _missing(ours: Sequence[BenchRow]) -> str:
    """Why none of our plans for a budget is within it."""
    states = {row.state for row in ours}
    if "measured" in states:
        return "our plan's measured peak is over the budget"
    return "no plan of ours fits" if "infeasible" in states else "no plan of ours"


def _duel(rival: str, ratio: Ratio, within: float) -> Duel:
    interval = Interval(ratio.low, ratio.value, math.inf if ratio.high is None else ratio.high)
    return Duel(rival=rival, ratio=ratio, verdict=judge(interval), settled=interval.half_width <= within)


def fastest(keys: Sequence[str], rounds: Rounds) -> str | None:
    """The row with the least median over the rounds that have all of them; None where there is no such round."""
    common = [seconds for seconds in rounds if all(key in seconds for key in keys)]
    if not keys or not common:
        return None
    return min(keys, key=lambda key: statistics.median(seconds[key] for seconds in common))


def open_rows(results: Iterable[BudgetResult], most_rounds: int) -> list[str]:
    """Rows that are worth another round: ours and each rival that may be the fastest, while that is not settled.

    A rival that is surely slower than ours decides nothing, unless it is the fastest of all.
    """
    wanted: dict[str, None] = {}
    for result in results:
        for place, duel in enumerate(result.duels):
            undecided = place == 0 or duel.verdict != "faster"
            if result.ours and undecided and not duel.settled and duel.ratio.rounds < most_rounds:
                wanted |= {result.ours: None, duel.rival: None}
    return list(wanted)
