"""What offloading claims on the host: foretold by ghost runs, held by searches, and true of real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autockpt.cost import CostModel, build_profile, uniform_graphs
from autockpt.cost.profile import wants_disk
from autockpt.cost.roofline import nominal_op_times
from autockpt.devices.hostpool import AREA_BYTES
from autockpt.errors import InfeasibleError
from autockpt.runtime import attach
from autockpt.schema import (
    OFFLOAD,
    SAVE,
    DeviceInfo,
    Environment,
    Offload,
    SearchRequest,
    SearchSpace,
    Silence,
    WorkloadSpec,
    parse_budget,
)
from autockpt.schema.space import HIDDEN_COPIES
from autockpt.shipped import load_space
from autockpt.tracing import Tracer
from autockpt.tuning.loop import Loop, SearchResult
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.question import Clock
from autockpt.tuning.targets.simulated import DRY, Simulated
from autockpt.tuning.trials import Trials
from autockpt.workload import build

pytestmark = pytest.mark.slow

SPEC = WorkloadSpec(model="llama-tiny", batch_size=4, seq_len=64, accumulate=2)
KINDS = ("save", "recompute", "offload", "recompute_offload")


def environment(kind: str) -> Environment:
    info = DeviceInfo(kind=kind, name="made up", capacity_bytes=1 << 40, copy_queues=kind != "cpu")
    return Environment(device=info, versions={})


def profiled(tracer: Tracer, kind: str, host_budget: int | None, kinds: tuple[str, ...] = KINDS):
    blocks = [unit for unit in tracer.units if unit.role == "block"]
    uniform = uniform_graphs(tracer, blocks, kinds)
    times = nominal_op_times(environment(kind), uniform["save"][1])
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
    blocks = [unit.name for unit in on_cpu.units if unit.role == "block"]
    choices = dict.fromkeys(blocks, OFFLOAD)
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


def test_both_micro_batches_use_the_same_place(on_gpu: Tracer):
    """Parcels end with the backward of their micro-batch: at no time are both on the host."""
    blocks = [unit.name for unit in on_gpu.units if unit.role == "block"]
    graph = on_gpu.trace({blocks[0]: OFFLOAD})
    out = [copy for copy in graph.copies if copy.direction == "out"]
    first = [copy for copy in out if copy.issued < out[len(out) // 2].issued]
    assert first and all(copy.released is not None for copy in out)
    assert max(copy.released or 0 for copy in first) <= out[len(out) // 2].issued


def host_needed(tracer: Tracer) -> int:
    graph = tracer.trace(dict.fromkeys((u.name for u in tracer.units if u.role == "block"), OFFLOAD))
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


def solved(known: CostModel, budget: str, space: SearchSpace) -> SearchResult:
    """What a dry run finds."""
    proposer = proposing(known, budget, space)
    return Loop(proposer, proposer.target, proposer.trials, 1, Clock(Silence())).run()


def proposing(known: CostModel, budget: str, space: SearchSpace) -> SolverProposer:
    request = SearchRequest(budget=parse_budget(budget), space=space, trials=1, host_budget=known.host_budget)
    return SolverProposer(request, known, Simulated(terms=DRY), Trials(None), None)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_plans_stay_within_both_budgets(on_gpu: Tracer, share: float):
    limit = int(host_needed(on_gpu) * share)
    known = profiled(on_gpu, "cuda", limit, ("save", "offload"))
    space = load_space("knobs").restricted(("save", "offload"))
    found = solved(known, "20%act", space)
    assert found.best is not None
    choices = found.best.choices
    predicted = known.predictor.predict(choices)
    assert predicted.host_bytes <= limit
    assert predicted.peak_bytes <= found.budget.bytes
    assert any(choice == Offload(tier="disk") for choice in choices.values())


def test_a_host_budget_that_makes_a_budget_unreachable_is_named(on_cpu: Tracer):
    space = load_space("knobs").restricted(("save", "offload"))
    free = profiled(on_cpu, "cpu", None, ("save", "offload"))
    lean = free.smallest_peak([])
    with pytest.raises(InfeasibleError, match="with at most") as caught:
        solved(profiled(on_cpu, "cpu", 4096, ("save", "offload")), f"{lean / 1e9:.6f}GB", space)
    assert "--host-budget" in caught.value.remedy
    assert caught.value.smallest_peak is not None and caught.value.smallest_peak > lean


def test_disk_copies_take_the_time_of_the_disk(on_gpu: Tracer):
    blocks = [unit.name for unit in on_gpu.units if unit.role == "block"]
    predictor = profiled(on_gpu, "cuda", None).predictor
    cpu = predictor.predict({blocks[0]: OFFLOAD}).step_seconds
    disk = predictor.predict({blocks[0]: Offload(tier="disk")}).step_seconds
    assert cpu is not None and disk is not None and disk > cpu


def test_the_probe_of_the_disk_measures_both_ways(tmp_path, monkeypatch):
    from autockpt.cost import op_times
    from tests.policies.deferred import DeferredDisk

    monkeypatch.setattr(op_times, "transport_for", lambda device, tier: DeferredDisk(tmp_path))
    monkeypatch.setattr(op_times, "DISK_PROBE_BYTES", 1 << 20)
    out, back = op_times.disk_bandwidths(torch.device("cpu"))
    assert out > 0 and back > 0


def test_copies_hide_behind_as_many_layers_as_they_take(on_gpu: Tracer):
    """All micro-batches of a cycle count into a layer's seconds; the link has those of one."""
    known = profiled(on_gpu, "cuda", None)
    saving, moved = (next(i for i in known.profile.menus[0].items if i.choice == c) for c in (SAVE, OFFLOAD))
    layers = 2.5  # that a layer's copies take
    bandwidth = moved.host_bytes / (layers * saving.forward_seconds / SPEC.accumulate)
    times = known.profile.op_times.model_copy(update={"copy_out_bandwidth": bandwidth})
    slower = replace(known, profile=known.profile.model_copy(update={"op_times": times}))
    offered = [option.choice for unit in slower.problem(0, hidden=1.0).units for option in unit.options]
    assert [c.window for c in offered if isinstance(c, Offload) and c != OFFLOAD] == [2]
    assert slower.problem(0) == known.problem(0) == known.problem(0, hidden=0.0)


def test_where_copies_do_not_run_beside_compute_none_are_hidden(on_cpu: Tracer, on_gpu: Tracer):
    space = load_space("knobs")
    assert HIDDEN_COPIES not in proposing(profiled(on_cpu, "cpu", None), "50%act", space).space.knobs
    assert HIDDEN_COPIES in proposing(profiled(on_gpu, "cuda", None), "50%act", space).space.knobs
