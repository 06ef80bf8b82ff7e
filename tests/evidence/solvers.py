"""How long the solvers take on transformer-shaped planning problems, and what they prove.

Run from the repository's root:  python -m tests.evidence.solvers
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from autockpt.schema.problem import Assignment, Problem
from autockpt.solvers import labels, milp
from tests.solvers.problems import transformer

TABLE = Path(__file__).resolve().parents[2] / "results" / "solver_cpu_202611" / "table.md"
SIZES, CHOICES = (32, 64, 128, 200), 6
SHARES = (0.15, 0.3, 0.5, 0.65, 0.8)
SOLVERS: dict[str, Callable[[Problem], Assignment]] = {"labels": labels, "milp": milp}


@dataclass
class Tally:
    """What one solver did on the problems of one row."""

    seconds: list[float]  # wall
    cpu: list[float]
    gaps: list[float]
    distances: list[float]  # from the optimum that ``labels`` proved, as a share of the step time

    def row(self, units: int, kind: str, solver: str) -> str:
        times = [f(t) for t in (self.seconds, self.cpu) for f in (statistics.median, max)]
        cells = [f"{units} × {CHOICES}", kind, solver, str(len(self.seconds)), *(f"{t:.3f}" for t in times)]
        return "| " + " | ".join([*cells, f"{max(self.gaps):.1e}", f"{max(self.distances):.1e}"]) + " |"


def run(units: int, identical: bool, seeds: int) -> dict[str, Tally]:
    """All solvers on all budgets and seeds of one size."""
    tallies = {name: Tally([], [], [], []) for name in SOLVERS}
    for seed in range(seeds):
        for share in SHARES:
            problem = transformer(units, CHOICES, seed=seed, share=share, identical=identical)
            optimum: Assignment | None = None
            for name, solve in SOLVERS.items():
                begin, cpu = time.perf_counter(), time.process_time()
                answer = solve(problem)
                tallies[name].seconds.append(time.perf_counter() - begin)
                tallies[name].cpu.append(time.process_time() - cpu)
                if not answer.feasible or answer.peak > problem.budget_bytes:
                    sys.exit(f"{name} broke the budget: {units} units, identical={identical}, seed {seed}, {share}")
                optimum = optimum or answer
                total = problem.base_seconds + optimum.seconds
                tallies[name].gaps.append(answer.gap)
                tallies[name].distances.append(max(0.0, answer.seconds - optimum.seconds) / total)
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
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "pydantic"))
    return f"{cpu}; Python {platform.python_version()}, {packages}"


def main() -> None:
    """Write the table, and show it row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    head = ["problem", "units", "solver", "runs", "median s", "longest s", "median CPU s", "longest CPU s"]
    head += ["largest proven gap", "largest distance to optimum"]
    lines = [environment(), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    print("\n".join(lines))
    for units in options.sizes:
        for identical in (True, False):
            for name, tally in run(units, identical, options.seeds).items():
                lines.append(tally.row(units, "identical" if identical else "different", name))
                print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
