"""The simulated study: autockpt's own search against known optima, and the table of samplers.

    OMP_NUM_THREADS=1 python -m tests.evidence.samplers [--part adds_up|queues|samplers]

Everything is simulated: no model is run, and the wall time of this script is no result. Rewrites one table per part.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from autockpt.schema.choices import searched_kinds
from autockpt.tracing.kernels.timeline import bytes_timeline
from tests.cost.made_up import simulated
from tests.evidence.samplers import engine, samplers
from tests.evidence.samplers.device import believed, menu_of
from tests.evidence.samplers.family import instance
from tests.evidence.samplers.reference import Costs
from tests.evidence.samplers.steps import signatures, step

PARTS: dict[str, Callable[[int], Iterator[str]]] = {
    "adds_up": lambda seeds: engine.rows(False, seeds),
    "queues": lambda seeds: engine.rows(True, seeds),
    "samplers": samplers.rows,
}
RESULTS = Path(__file__).resolve().parents[3] / "results" / "samplers_cpu_202611"
CHECKED_PLANS = 10


def check(queues: bool) -> str:
    """Hold the numbers that optima are computed from against the simulator, on random plans."""
    made = instance(1, 32, 3, queues=queues, share=0.3)
    costs = Costs.of(made, menu_of(believed(made, searched_kinds(), seed=0, error=0.0)))
    rng = random.Random(0)
    for _ in range(CHECKED_PLANS):
        weights = [rng.random() for _ in costs.menu]
        plan = {unit: rng.choices(costs.menu, weights)[0] for unit in made.units}
        ways = {"bandwidth_out": made.bandwidth, "bandwidth_in": made.bandwidth, "copy_queues": queues}
        graph = step(made, plan)
        found = simulated(graph, signatures(made), **ways)
        (seconds,), (peak,) = costs.judge(costs.picks(plan)[None])
        if peak != bytes_timeline(graph).max() or abs(seconds / found.step_seconds - 1) > 1e-9:
            raise SystemExit(f"the optimum's numbers are not the simulator's: {plan}")
    return f"{CHECKED_PLANS} random plans: the optimum's bytes are the simulator's, its seconds to 1e-9"


def main() -> None:
    """Write the tables, and show them row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=tuple(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    gc.disable()  # millions of small objects without cycles: collecting them takes longer than making them
    packages = ", ".join(f"{name} {version(name)}" for name in ("optuna", "numpy", "scipy", "torch"))
    for part in [options.part] if options.part else PARTS:
        checked = [check(queues) for queues in ((False, True) if part == "samplers" else (part == "queues",))]
        lines = [f"Simulated. {options.seeds} seeds; Python {platform.python_version()}, {packages}. {checked[0]}.", ""]
        for line in PARTS[part](options.seeds):
            lines.append(line)
            print(line, flush=True)
            gc.collect()
            (RESULTS / f"{part}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
