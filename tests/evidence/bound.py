"""How cheap could a plan be? The exact front of one layer, op by op, and the least overhead that it allows at a budget.

    OMP_NUM_THREADS=1 python -m tests.evidence.bound > results/choices_cpu_202611/bound.md

The 8-layer Llama of ``results/bench_cpu_202611`` (8 × 256 tokens, packed, no optimizer). Seconds are of single ops,
timed in real steps on this machine (``llama_op_times.json``); all is computed from them, nothing is measured here. The
plans go to ``llama_plans.json``, for ``beside_ilp.py``.

*Ideal*: every subset of what a layer saves for backward is tried. What is dropped is made again from what is kept, each
op once, with no host cost; layers choose freely among the points of that front, and only the bytes at the turn from
forward to backward count, as if making tensors again took no memory. So no plan that saves or makes again can be
cheaper at these op times. *Ours*: the solver's plan, ghost-run, with and without the choice ``remake``, in the same
seconds, ops that run again as dear as at first.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autockpt.cost.profile import CostModel, build_profile, uniform_graphs
from autockpt.schema import Choice, Graph, OpTimes, Unit, WorkloadSpec
from autockpt.schema.choices import dump_choice
from autockpt.schema.problem import Point, Problem, UnitOptions
from autockpt.solvers import exact, refine
from autockpt.tracing import Tracer
from tests.solvers.problems import Level, option

RESULTS = Path(__file__).resolve().parents[2] / "results"
HERE = RESULTS / "choices_cpu_202611"
LLAMA = RESULTS / "bench_cpu_202611" / "llama.json"
SPEC = WorkloadSpec(model=str(LLAMA), batch_size=8, seq_len=256, optimizer="none", packed=True)
KINDS = ("save", "recompute", "keep_attention", "selective", "remake")
SHARES = (0.85, 0.60, 0.45, 0.30)
SMALL = 2**18  # bytes: statistics of norms and attention
MIB = 2**20


class Layer:
    """The forward of one layer: which op made each storage, and what is saved."""

    def __init__(self, graph: Graph, unit: Unit, times: OpTimes) -> None:
        ops = [op for op in graph.ops if op.phase == "forward" and op.unit == unit.name]
        numbers = {op.index for op in ops}
        self.makers = {s.id: graph.ops[s.birth] for s in graph.storages if s.birth in numbers}
        self.sizes = {s.id: s.bytes for s in graph.storages}
        turn = next(op.index for op in graph.ops if op.phase == "backward")
        saved = [s.id for s in graph.storages if s.id in self.makers and s.kind == "activation" and s.alive_at(turn)]
        self.kept = [s for s in saved if self.sizes[s] <= SMALL]
        self.saved = [s for s in saved if self.sizes[s] > SMALL]
        self.seconds = {op.index: times.seconds[graph.signatures[op.signature]] for op in ops}
        self.unit = unit.name

    def name(self, storage: int) -> str:
        op = self.makers[storage]
        return f"{op.module.removeprefix(self.unit).lstrip('.') or 'layer'} {op.target.split('.')[1]}"

    def again(self, dropped: frozenset[int]) -> float:
        """Seconds of the ops that must run again."""
        needed: set[int] = set()
        open_ends = list(dropped)
        while open_ends:
            op = self.makers.get(open_ends.pop())
            if op is not None and op.index not in needed:
                needed.add(op.index)
                at_hand = (*self.kept, *(s for s in self.saved if s not in dropped))
                open_ends += [s for s in op.inputs if s not in at_hand]
        return sum(self.seconds[index] for index in needed)

    def front(self) -> list[tuple[int, float, frozenset[int]]]:
        """(bytes freed, seconds, dropped) of every subset that no other beats."""
        found = []
        for count in range(len(self.saved) + 1):
            for chosen in itertools.combinations(self.saved, count):
                dropped = frozenset(chosen)
                found.append((sum(self.sizes[s] for s in dropped), self.again(dropped), dropped))
        found.sort(key=lambda point: (-point[0], point[1]))
        best: list[tuple[int, float, frozenset[int]]] = []
        for point in found:
            if not best or point[1] < best[-1][1]:
                best.append(point)
        return best[::-1]


def least(front: list[tuple[int, float, frozenset[int]]], layers: int, need: int) -> float | None:
    """The fewest seconds for which so many layers free the bytes needed; None where they cannot."""
    most = max(freed for freed, _, _ in front)
    options = tuple(option(Level(level=k), p[1], most - p[0], 0, 0) for k, p in enumerate(front))
    units = tuple(UnitOptions(name=str(i), options=options) for i in range(layers))
    budget = layers * most - need
    found = exact(Problem(units=units, points=(Point(base=0, prefix=layers),), budget_bytes=budget))
    return found.seconds if found.feasible else None


def ours(profiles: Sequence[CostModel], budget: int, plans: list[dict[str, Choice]]) -> Iterator[str]:
    """Predicted overhead and peak of the solver's plan, without ``remake`` and with it; and the latter's choices.

    The plans are added to ``plans``.
    """
    for profiled in profiles:
        plan = dict(refine(profiled.problem(budget), profiled.check).choices)
        plans.append(plan)
        said = profiled.predictor.predict(plan)
        assert said.step_seconds is not None
        over = said.step_seconds / profiled.profile.save_all_seconds - 1
        yield f"{over:+.1%} at {said.peak_bytes / profiled.base.peak_bytes:.1%}"
    runs = [(str(choice), len(list(same))) for choice, same in itertools.groupby(plans[-1].values())]
    yield "; ".join(f"{count} × {choice}" for choice, count in runs)


def main() -> None:
    """One layer's tensors and front, then one line per budget."""
    times = OpTimes.model_validate_json((HERE / "llama_op_times.json").read_text()).model_copy(
        update={"rerun_scale": 1.0, "host_seconds": 0.0}
    )
    with Tracer.from_spec(SPEC) as tracer:
        base = tracer.trace()
        blocks = base.blocks()
        layer = Layer(base, blocks[len(blocks) // 2], times)
        front = layer.front()
        print("| saved by a layer | MiB | ms to make again if it alone is dropped |\n|---|--:|--:|")
        for s in layer.saved:
            print(f"| {layer.name(s)} | {layer.sizes[s] / MIB:.2f} | {layer.again(frozenset([s])) * 1e3:.2f} |")
        print("\n| ideal front: MiB freed | ms | dropped |\n|--:|--:|---|")
        for freed, seconds, dropped in front:
            names = ", ".join(layer.name(s) for s in layer.saved if s in dropped)
            print(f"| {freed / MIB:.2f} | {seconds * 1e3:.2f} | {names or 'nothing'} |")
        kinds = [kind for kind in KINDS if kind != "remake"], KINDS
        profiles = [build_profile(tracer, times, uniform_graphs(tracer, blocks, some)) for some in kinds]
        plain = profiles[0].profile.save_all_seconds
        print("\n| budget | ideal | ours without remake | ours | plan |\n|--:|--:|--:|--:|---|", flush=True)
        found: dict[str, Any] = {}
        for share in SHARES:
            budget = int(share * base.peak_bytes)
            bound = least(front, len(blocks), base.peak_bytes - budget)
            ideal = "none" if bound is None else f"{bound / plain:+.1%}"
            plans: list[dict[str, Choice]] = []
            print(f"| {share:.0%} | {ideal} | {' | '.join(ours(profiles, budget, plans))} |", flush=True)
            found[f"{share:.0%}"] = {name: dump_choice(choice) for name, choice in plans[-1].items()}
    (HERE / "llama_plans.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
