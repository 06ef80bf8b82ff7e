"""What a simulated device is promised to need."""

from __future__ import annotations

import pytest

from autockpt.checkpointing.fingerprint import TABLE_BYTES
from autockpt.cost import memory_at_hand, simulated_memory
from autockpt.cost.predictor import SAFETY
from autockpt.schema import OFFLOAD, DeviceInfo, Environment, Graph, OpTimes, WorkloadSpec
from autockpt.shipped import load_hardware
from autockpt.tracing import tracer_for
from autockpt.tracing.kernels.allocator import SMALL_SIZE
from autockpt.tracing.kernels.cuda_memory import device_peak, with_resident, workspaces_stay

CARD, CPU = load_hardware("rtx4090"), load_hardware("cpu")
SPEC = WorkloadSpec(model="llama-small", batch_size=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    with tracer_for(CARD, SPEC) as tracer:
        blocks = [unit.name for unit in tracer.units if unit.role == "block"]
        return tracer.trace({name: OFFLOAD for name in blocks[::2]})


@pytest.mark.slow
def test_a_promise_holds_context_reserve_and_margin(graph: Graph) -> None:
    peak = device_peak(CARD, graph)
    assert ("matrix workspaces" in graph.resident) == workspaces_stay(CARD.kind)  # as the device sees it
    assert simulated_memory(CARD)(graph) == peak.total + int(SAFETY * peak.reserved) > graph.peak_bytes


@pytest.mark.slow
def test_under_a_budget_cached_segments_are_given_back_before_it_fails(graph: Graph) -> None:
    free = simulated_memory(CARD)(graph)
    budgets = range(free, graph.peak_bytes, -(2 << 20))
    least = min(budget for budget in budgets if simulated_memory(CARD, budget)(graph) <= budget)
    assert graph.peak_bytes + CARD.context_bytes < least <= free
    tight = simulated_memory(CARD, least)
    assert tight.least(graph, tight(graph)) <= tight(graph)
    hopeless = simulated_memory(CARD, graph.peak_bytes)
    assert hopeless(graph) > graph.peak_bytes and hopeless.least(graph, hopeless(graph)) == hopeless(graph)


def test_an_accelerator_at_hand_needs_whole_segments_and_its_context_without_a_margin(graph: Graph) -> None:
    device = DeviceInfo(kind="xpu", name="x", capacity_bytes=CARD.memory_bytes, overhead_bytes=CARD.context_bytes)
    environment = Environment(device=device, versions={})
    needs = memory_at_hand(environment)
    assert TABLE_BYTES <= SMALL_SIZE  # or it would keep activations from sharing a segment
    beside = with_resident(graph, "fingerprints", [TABLE_BYTES], "other")
    assert needs is not None and needs(graph) == device_peak(CARD, beside).total
    assert needs.within(needs(graph) - (1 << 20))(graph) < needs(graph)  # cached segments are given back
    libraries = with_resident(beside, "matrix workspaces", [32 << 20] * 2, "other")
    times = OpTimes(environment=environment, seconds={}, workspaces=(32 << 20, 32 << 20))
    needs = memory_at_hand(environment, times=times)
    assert needs is not None and needs(graph) == device_peak(CARD, libraries).total
    cpu = Environment(device=device.model_copy(update={"kind": "cpu"}), versions={})
    assert memory_at_hand(cpu) is None


def test_an_allocator_whose_segments_expand_is_not_held_to_have_segments(graph: Graph) -> None:
    device = DeviceInfo(kind="cuda", name="x", capacity_bytes=CARD.memory_bytes, overhead_bytes=CARD.context_bytes)
    settings = {"allocator settings": "PYTORCH_ALLOC_CONF=expandable_segments:True"}
    expands, plain = (memory_at_hand(Environment(device=device, versions=v)) for v in (settings, {}))
    assert expands is not None and plain is not None
    assert expands(graph) == graph.peak_bytes + TABLE_BYTES + CARD.context_bytes < plain(graph)


def test_a_context_that_grew_while_steps_ran_is_counted() -> None:
    info = DeviceInfo(kind="cuda", name="x", capacity_bytes=CARD.memory_bytes, overhead_bytes=600 << 20)
    times = OpTimes(environment=Environment(device=info, versions={}, platform=""), seconds={})
    assert times.device == info  # nothing is known
    assert times.model_copy(update={"context_bytes": 700 << 20}).device.overhead_bytes == 700 << 20


@pytest.mark.slow
def test_without_a_caching_allocator_it_is_what_tensors_hold() -> None:
    with tracer_for(CPU, SPEC) as tracer:
        graph = tracer.trace()
    assert simulated_memory(CPU)(graph) == graph.peak_bytes + CPU.context_bytes


@pytest.mark.slow
def test_sharding_is_seen_by_every_graph(graph: Graph) -> None:
    with tracer_for(CARD, SPEC.model_copy(update={"shard": 4})) as tracer:
        shared = tracer.trace()
    assert shared.resident["weights"] < graph.resident["weights"] / 3
