import pytest
import torch
from torch import nn

from autockpt import Step
from autockpt.cost.menus import build_menus, representatives
from autockpt.cost.problem import build_problem
from autockpt.cost.profile import segments_of
from autockpt.cost.simulation import Simulation
from autockpt.schema import RECOMPUTE, SAVE, Choice, Graph, Segment
from autockpt.solvers import Checked, refine, refine_segmented
from autockpt.solvers.problem import Problem, peak_of
from autockpt.solvers.segments import Member, segmented
from autockpt.tracing import Tracer
from tests.cost.made_up import simulated
from tests.solvers.problems import uniform_problem

pytestmark = pytest.mark.slow

DEPTH, WIDTH, ROWS = 12, 64, 512


class Thin(nn.Module):
    """A block that keeps little more than what enters it: where many of them follow, segments win."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.up(x))


def constant(graph: Graph) -> Simulation:
    return simulated(graph, dict.fromkeys(graph.signatures, 1e-5), bandwidth_out=1e9, bandwidth_in=1e9)


def test_their_linear_peak_covers_the_ghost_peak() -> None:
    deep = nn.Sequential(*(Thin() for _ in range(DEPTH)))
    step = Step(deep, torch.randn(ROWS, WIDTH), loss=lambda model, x: model(x).square().mean())
    with Tracer.from_step(step, fallback=False) as tracer:
        base = tracer.trace()
        of_kind = representatives(base.blocks())
        variants = {(k, RECOMPUTE): tracer.trace({u.name: RECOMPUTE}) for k, u in of_kind.items()}
        menus = build_menus(base, variants, constant)  # type: ignore[arg-type]
        free = build_problem(base, menus, base.peak_bytes)
        segments = segments_of(base, menus)
        assert len(segments) == DEPTH

        def check(choices: dict[str, Choice]) -> Checked:
            return Checked(tracer.trace(choices).peak_bytes)

        seen = set()
        for problem in segmented(free, segments):
            plan = {u.name: u.options[0].choice for u in problem.units}  # what is not in a segment saves
            seen.add(plan[problem.units[0].name])
            assert 0.999 * peak_of(problem, plan) <= check(plan).peak_bytes <= 1.001 * peak_of(problem, plan)
        assert Segment(size=2) in seen and Segment(size=6) in seen
        recomputing = check(dict.fromkeys(segments, RECOMPUTE)).peak_bytes
        tight = free.model_copy(update={"budget_bytes": recomputing - WIDTH * ROWS * 4})
        assert not refine(tight, check, max_calls=6).feasible
        found = refine_segmented(tight, check, segments, max_calls=6)
        assert found.feasible and check(found.choices).peak_bytes <= tight.budget_bytes
        assert {c.kind for c in found.choices.values()} >= {"segment"}


def priced(problem: Problem, choices: dict[str, Choice], rest: float) -> float:
    """Seconds of a plan by hand: recompute takes one, and all but the last unit of a segment the rest besides."""
    names = list(choices)
    total = 0.0
    for i, name in enumerate(names):
        choice = choices[name]
        run = next(k for k in range(i, -1, -1) if k == 0 or choices[names[k - 1]] != choice)
        last = isinstance(choice, Segment) and (
            (i - run) % choice.size == choice.size - 1 or choices.get(names[min(i + 1, len(names) - 1)]) != choice
        )
        total += 0.0 if choice == SAVE else 3.0 if choice.kind == "offload" else 1.0
        total += rest if isinstance(choice, Segment) and not last else 0.0
    return total


@pytest.mark.parametrize("budget", range(108, 180, 12))
@pytest.mark.parametrize("rest", [0.0, 0.4, 5.0])
def test_they_are_taken_where_they_are_faster_and_only_there(budget: int, rest: float) -> None:
    """Twelve units of which save keeps 10 and recompute 2; offload, which keeps 1, takes three times as long."""
    problem = uniform_problem(12, budget)
    segments = {u.name: Member(rest, 1) for u in problem.units}

    def check(choices: dict[str, Choice]) -> Checked:
        asked = next((p for p in [problem, *segmented(problem, segments)] if _offers(p, choices)), None)
        assert asked is not None
        return Checked(peak_of(asked, choices))

    plain = refine(problem, check, max_calls=12)
    found = refine_segmented(problem, check, segments, max_calls=12)
    if plain.feasible:
        assert found.feasible
        gain = plain.assignment.seconds - found.assignment.seconds
        assert gain == 0 or gain > 0.002 * problem.base_seconds
    if found.feasible:
        assert found.assignment.seconds == pytest.approx(priced(problem, found.choices, rest))
        assert check(found.choices).peak_bytes <= budget
    if rest == 5.0 and plain.feasible:
        assert found.choices == plain.choices
    if rest == 0.0 and budget == 132:
        assert any(isinstance(c, Segment) for c in found.choices.values())


def _offers(problem: Problem, choices: dict[str, Choice]) -> bool:
    return all(choices[u.name] in [o.choice for o in u.options] for u in problem.units)
