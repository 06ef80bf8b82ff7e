"""How long the solver takes on transformer-shaped planning problems, and what it proves.

Run from the repository's root:  python -m tests.evidence.solvers
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from autockpt.schema.choices import Choice
from autockpt.schema.problem import Problem, host_of
from autockpt.solvers import exact
from tests.solvers.problems import transformer

TABLE = Path(__file__).resolve().parents[2] / "results" / "solver_cpu_202611" / "table.md"
SIZES, CHOICES = (32, 64, 128, 200), 6
SHARES = (0.15, 0.3, 0.5, 0.65, 0.8)
HOST_SHARES = (0.2, 0.7)


@dataclass
class Tally:
    """What the solver did on the problems of one row."""

    seconds: list[float] = field(default_factory=list)  # wall
    cpu: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def solve(self, problem: Problem) -> dict[str, Choice]:
        """The plan. Ends the program where it breaks a budget."""
        begin, cpu = time.perf_counter(), time.process_time()
        answer = exact(problem)
        self.seconds.append(time.perf_counter() - begin)
        self.cpu.append(time.process_time() - cpu)
        self.gaps.append(answer.gap)
        host = problem.host_budget
        if answer.peak > problem.budget_bytes or (host is not None and host_of(problem, answer.choices) > host):
            sys.exit(f"a budget is broken: {problem}")
        return answer.choices

    def row(self, units: int, kind: str, host: str) -> str:
        times = [f(t) for t in (self.seconds, self.cpu) for f in (statistics.median, max)]
        cells = [f"{units} × {CHOICES}", kind, host, str(len(self.seconds)), *(f"{t:.3f}" for t in times)]
        return "| " + " | ".join([*cells, f"{max(self.gaps):.1e}"]) + " |"


def offloading(problem: Problem) -> Problem:
    """The problem with half of its choices moving to the host what they do not keep, for less time."""
    units = []
    for unit in problem.units:
        first, *others = unit.options
        moved = [
            o.model_copy(update={"host": first.kept - o.kept, "seconds": (0.3 + 0.1 * k) * o.seconds})
            for k, o in enumerate(others[CHOICES // 2 - 1 :], CHOICES // 2)
        ]
        units.append(unit.model_copy(update={"options": (first, *others[: CHOICES // 2 - 1], *moved)}))
    return problem.model_copy(update={"units": tuple(units)})


def run(units: int, identical: bool, seeds: int) -> dict[str, Tally]:
    """All budgets and seeds of one size."""
    tallies = {"none": Tally(), "binds": Tally()}
    for seed in range(seeds):
        for share in SHARES:
            problem = transformer(units, CHOICES, seed=seed, share=share, identical=identical)
            tallies["none"].solve(problem)
            moving = offloading(problem)
            most = host_of(moving, exact(moving).choices)
            for host in HOST_SHARES:
                tallies["binds"].solve(moving.model_copy(update={"host_budget": int(host * most)}))
    return tallies


def environment() -> str:
    """CPU and versions, in one line."""
    info = Path("/proc/cpuinfo")
    found = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    cpu = f"{found[0]}, {len(found)} logical cores" if found else platform.processor()
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "pydantic"))
    return f"{cpu}; Python {platform.python_version()}, {packages}"


def main() -> None:
    """Write the table, and show it row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    head = ["problem", "units", "host budget", "runs", "median s", "longest s", "median CPU s", "longest CPU s"]
    head += ["largest gap left unproven"]
    lines = [environment(), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    print("\n".join(lines))
    for units in options.sizes:
        for identical in (True, False):
            for host, tally in run(units, identical, options.seeds).items():
                lines.append(tally.row(units, "identical" if identical else "different", host))
                print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
