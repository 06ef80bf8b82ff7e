import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.cost.menus import build_menus, representatives
from autockpt.cost.op_ranges import op_ranges
from autockpt.cost.problem import NEARLY_FREE, build_problem, hidden_copies, point_bytes
from autockpt.cost.simulation import Simulation
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Offload
from autockpt.schema.graph import Graph, Storage
from autockpt.schema.workload import WorkloadSpec
from autockpt.solvers import Checked, refine
from autockpt.solvers.problem import Option, Problem, UnitOptions, peak_of, seconds_of
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.cost.made_up import simulated
from tests.cost.steps import SECONDS, step

Variants = dict[tuple[int, Choice], Graph]
NAMES = [f"layers.{i}" for i in range(5)]
CHOICES = (SAVE, RECOMPUTE, OFFLOAD)


def simulation(graph: Graph) -> Simulation:
    return simulated(graph, SECONDS, bandwidth_out=10.0, bandwidth_in=20.0)


def problem_of(names: list[str] = NAMES, budget: int = 10**6, *, simulated=simulation, **how) -> tuple[Graph, Problem]:
    base = step(names, **how)
    unit = representatives(base.blocks())[0].name
    variants: Variants = {(0, c): step(names, {unit: c}, **how) for c in CHOICES[1:]}
    return base, build_problem(base, build_menus(base, variants, simulated), budget)


def test_op_ranges_cover_every_op_once_and_in_order():
    graph = step(NAMES, {"layers.1": RECOMPUTE}, micro_batches=2)
    ranges = op_ranges(graph, NAMES)
    assert [r.first for r in ranges[1:]] == [r.end for r in ranges[:-1]]
    assert (ranges[0].first, ranges[-1].end) == (0, len(graph.ops))
    assert len({r.key for r in ranges}) == len(ranges)
    second = [r for r in ranges if r.micro_batch == 1 and r.part in ("forward", "backward")]
    assert [r.unit for r in second] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("how", [{}, {"micro_batches": 3}, {"lag": True}], ids=["plain", "accumulate", "lag"])
def test_saving_everything_is_exact_at_every_point(how):
    base, problem = problem_of(**how)
    everything = dict.fromkeys(NAMES, SAVE)
    assert peak_of(problem, everything) == base.peak_bytes
    assert seconds_of(problem, everything) == 0.0
    assert len(point_bytes(base, base)) == len(problem.points)
    assert max(b for b in point_bytes(base, base) if b is not None) == base.peak_bytes


@pytest.mark.parametrize("how", [{}, {"micro_batches": 2}], ids=["plain", "accumulate"])
def test_the_linear_peak_is_the_ghost_peak_of_any_mix(how):
    _, problem = problem_of(**how)
    for kinds in itertools.product(CHOICES, repeat=len(NAMES)):
        choices = dict(zip(NAMES, kinds, strict=True))
        assert peak_of(problem, choices) == step(NAMES, choices, **how).peak_bytes


def test_memory_that_all_layers_share_is_no_layers_cost():
    """Also where a choice leaves no op of a range that plain training has."""
    alone = step(NAMES, {"layers.2": RECOMPUTE})
    table = Storage(id=len(alone.storages), bytes=10**4, birth=0, death=None)
    ops = tuple(replace(op, unit="layers.4") if op.target == "head" else op for op in alone.ops)
    shared = alone.model_copy(update={"ops": ops, "storages": (*alone.storages, table)})
    menus = [build_menus(step(NAMES), {(0, RECOMPUTE): graph}, simulation)[0] for graph in (alone, shared)]
    assert len({menu.items[1].kept_bytes for menu in menus}) == 1


def test_costs_are_scaled_by_kind_of_choice():
    base = step(NAMES)
    menus = build_menus(base, {(0, RECOMPUTE): step(NAMES, {"layers.2": RECOMPUTE})}, simulation)
    plain = build_problem(base, menus, 5000, base_seconds=40.0)
    turned = build_problem(base, menus, 5000, scale={"recompute": 1.5}, base_seconds=40.0)
    assert plain.budget_bytes == turned.budget_bytes == 5000 and turned.base_seconds == 40.0
    everything = dict.fromkeys(NAMES, RECOMPUTE)
    assert seconds_of(plain, everything) == pytest.approx(5 * 2.0)
    assert seconds_of(turned, everything) == pytest.approx(5 * 2.0 * 1.5)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "accumulate", "in_flight"), [("llama-tiny", 1, None), ("gpt2-tiny", 5, 3)])
def test_linear_peaks_of_real_models_agree_with_their_ghost_runs(model: str, accumulate: int, in_flight: int | None):
    """Saving everything to the byte, mixed plans within 1 %, and refined plans that fit."""
    rng = random.Random(1)
    trained = build(WorkloadSpec(model=model, batch_size=2, accumulate=accumulate))
    with Tracer.from_step(replace(trained, in_flight=in_flight)) as tracer:
        base = tracer.trace()
        names = [u.name for u in base.blocks()]
        unit = representatives(base.blocks())[0].name
        variants: Variants = {(0, c): tracer.trace({unit: c}) for c in CHOICES[1:]}

        def constant(graph: Graph) -> Simulation:
            seconds = dict.fromkeys(graph.signatures, 1e-5)
            return simulated(graph, seconds, bandwidth_out=1e9, bandwidth_in=2e9)

        problem = build_problem(base, build_menus(base, variants, constant), base.peak_bytes)
        assert peak_of(problem, dict.fromkeys(names, SAVE)) == base.peak_bytes
        leanest = base.peak_bytes
        for _ in range(5):
            choices = {name: rng.choice(CHOICES) for name in names}
            graph = tracer.trace(choices)
            leanest = min(leanest, graph.peak_bytes)
            assert peak_of(problem, choices) == pytest.approx(graph.peak_bytes, rel=0.01)
            extra = constant(graph).step_seconds - constant(base).step_seconds
            assert seconds_of(problem, choices) == pytest.approx(extra, rel=0.02)
        tight = problem.model_copy(update={"budget_bytes": (leanest + base.peak_bytes) // 2})
        refined = refine(tight, lambda choices: Checked(tracer.trace(choices).peak_bytes))
        assert refined.feasible
        assert tracer.trace(refined.choices).peak_bytes <= tight.budget_bytes


HOST = 100  # bytes of each unit


def with_copies(n: int, host_budget: int | None = None) -> Problem:
    options = (
        Option(choice=SAVE, seconds=0.0, kept=HOST, forward=0, backward=0),
        Option(choice=RECOMPUTE, seconds=1.0, kept=0, forward=0, backward=0),
        Option(choice=OFFLOAD, seconds=5.0, kept=0, forward=0, backward=0, host=HOST),
    )
    units = tuple(UnitOptions(name=f"u{i}", options=options) for i in range(n))
    return Problem(units=units, points=(), budget_bytes=0, host_budget=host_budget)


def windows(found: Problem) -> dict[int, int]:
    """The window of every unit whose copies are hidden."""
    return {
        i: option.choice.window
        for i, unit in enumerate(found.units)
        for option in unit.options
        if isinstance(option.choice, Offload) and option.seconds < 5.0
    }


def test_layers_that_take_half_as_long_as_their_copies() -> None:
    found = hidden_copies(with_copies(8), [1.0] * 8, HOST / 2)
    # copies of 0 take seconds 0 to 2, of 1 seconds 2 to 4, of 3 seconds 4 to 6, and of 5 those to 8
    assert windows(found) == {0: 1, 1: 2, 3: 2, 5: 2}
    assert [option.choice for option in found.units[1].options] == [SAVE, RECOMPUTE, Offload(window=2)]
    assert found.units[1].options[2].seconds == NEARLY_FREE * 5.0
    assert found.units[2] == with_copies(8).units[2]


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12), st.floats(0.1, 3.0), st.integers(0, 12))
def test_every_copy_is_over_when_its_window_ends(forwards: list[float], seconds: float, most: int) -> None:
    found = windows(hidden_copies(with_copies(len(forwards), most * HOST), forwards, HOST / seconds))
    ends = list(itertools.accumulate(forwards))
    free = 0.0
    for place, window in sorted(found.items()):
        free = max(free, ends[place] - forwards[place]) + seconds
        assert window >= 1 and ends[place + window] >= free - 1e-6
    assert len(found) <= most
