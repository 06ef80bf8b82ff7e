"""What offloading claims on the host: foretold by ghost runs, held by searches, and true of real steps."""

import pytest

from autockpt.cost import CostModel, build_profile, uniform_graphs
from autockpt.cost.profile import wants_disk
from autockpt.cost.roofline import nominal_op_times
from autockpt.devices.hostpool import AREA_BYTES
from autockpt.runtime import attach
from autockpt.schema import OFFLOAD, Offload, SearchRequest, SearchSpace, Silence, WorkloadSpec, parse_budget
from autockpt.tracing import Tracer
from autockpt.tuning.clock import Clock
from autockpt.tuning.loop import Loop
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.targets.simulated import Simulated
from autockpt.tuning.trials import Trials
from autockpt.workload import build
from tests.samples import environment
from tests.tracing.reference import uniform

pytestmark = pytest.mark.slow

SPEC = WorkloadSpec(model="llama-tiny", batch_size=4, seq_len=64, accumulate=2)
KINDS = ("save", "recompute", "offload", "recompute_offload")


def profiled(tracer: Tracer, kind: str, host_budget: int | None, kinds: tuple[str, ...] = KINDS):
    blocks = [unit for unit in tracer.units if unit.role == "block"]
    uniform = uniform_graphs(tracer, blocks, kinds)
    times = nominal_op_times(environment(kind, copy_queues=kind != "cpu"), [uniform["save"][1]])
    return build_profile(tracer, times, uniform, host_budget=host_budget)


@pytest.fixture(scope="module")
def on_cpu():
    with Tracer.from_spec(SPEC, fallback=False) as tracer:
        yield tracer


@pytest.fixture(scope="module")
def on_gpu():
    with Tracer.from_spec(SPEC, device="cuda", fallback=False) as tracer:
        yield tracer


@pytest.mark.parametrize("limited", [False, True])
def test_real_steps_claim_what_was_foretold(on_cpu: Tracer, limited: bool):
    choices = uniform("offload", on_cpu.units)
    limit = None
    if limited:
        graph = on_cpu.trace(choices)
        out = sum(copy.bytes for copy in graph.copies if copy.direction == "out")
        limit = out // 4096 * 4096
    predictor = profiled(on_cpu, "cpu", limit).predictor
    foretold = predictor.predict(choices).host_bytes
    workload = build(SPEC, "cpu")
    with attach(workload.model, choices, host_budget=limit) as session:
        for _ in range(3):
            workload.cycle(None)
        assert session.host_bytes == foretold
    assert foretold == (AREA_BYTES if limit is None else min(limit, AREA_BYTES))


def host_needed(tracer: Tracer) -> int:
    graph = tracer.trace(uniform("offload", tracer.units))
    return sum(copy.bytes for copy in graph.copies if copy.direction == "out") // SPEC.accumulate


def test_the_disk_tier_is_tried_where_the_host_budget_binds(on_gpu: Tracer):
    needed = host_needed(on_gpu)
    free = profiled(on_gpu, "cuda", None)
    bound = profiled(on_gpu, "cuda", needed // 2)
    tiers = lambda p: {item.choice for menu in p.profile.menus for item in menu.items}  # noqa: E731
    assert Offload(tier="disk") not in tiers(free)
    assert Offload(tier="disk") in tiers(bound)
    by_choice = {item.choice: item for item in bound.profile.menus[0].items}
    disk, cpu = by_choice[Offload(tier="disk")], by_choice[OFFLOAD]
    assert (disk.host_bytes, cpu.host_bytes > 0) == (0, True)
    assert disk.kept_bytes == cpu.kept_bytes
    assert disk.copy_seconds > cpu.copy_seconds
    uniform = {"offload": ({}, on_gpu.trace(dict.fromkeys((u.name for u in bound.blocks), OFFLOAD)))}
    assert not wants_disk(uniform, environment("cpu").device, needed // 2)  # there it is a file anyway


def solved(known: CostModel, budget: str, space: SearchSpace) -> Loop:
    """What a simulated search finds."""
    bound = {"host_budget": known.host_budget, "simulate": True}
    request = SearchRequest(budget=parse_budget(budget), space=space, trials=1, **bound)
    clock = Clock(Silence())
    target, trials = Simulated(request, clock), Trials(None, clock)
    loop = Loop(SolverProposer(request, known, target, trials, {}), target, trials)
    loop.run()
    return loop


def test_plans_stay_within_both_budgets(on_gpu: Tracer):
    limit = int(host_needed(on_gpu) * 0.3)
    known = profiled(on_gpu, "cuda", limit, ("save", "offload"))
    space = SearchSpace().restricted(("save", "offload"))
    found = solved(known, "20%act", space)
    assert found.best is not None
    choices = found.best.choices
    predicted = known.predictor.predict(choices)
    assert predicted.host_bytes <= limit
    assert predicted.peak_bytes <= found.budget.bytes
    assert any(choice == Offload(tier="disk") for choice in choices.values())
