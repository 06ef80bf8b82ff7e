"""The memory that a device is predicted to need."""

import pytest

from autockpt.checkpointing.fingerprint import TABLE_BYTES
from autockpt.cost import local_memory, simulated_memory
from autockpt.cost.predictor import SAFETY
from autockpt.schema import OFFLOAD, Graph, OpTimes, WorkloadSpec
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer
from autockpt.tracing.kernels.allocator import SMALL_SIZE, replay, requests
from autockpt.tracing.kernels.cuda_memory import with_resident
from tests.samples import environment

CARD = load_hardware("rtx4090")
SPEC = WorkloadSpec(model="llama-small", batch_size=2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    with Tracer.from_spec(SPEC, hardware=CARD) as tracer:
        blocks = [unit.name for unit in tracer.units if unit.role == "block"]
        return tracer.trace({name: OFFLOAD for name in blocks[::2]})


@pytest.mark.slow
def test_a_promise_holds_context_reserve_and_margin(graph: Graph) -> None:
    reserved = replay(requests(graph)).reserved
    assert "matrix workspaces" in graph.resident  # as the device sees it
    assert simulated_memory(CARD)(graph) == CARD.context_bytes + reserved + int(SAFETY * reserved) > graph.peak_bytes


@pytest.mark.slow
def test_cached_segments_are_given_back_before_a_budget_fails(graph: Graph) -> None:
    free = simulated_memory(CARD)(graph)
    budgets = range(free, graph.peak_bytes, -(8 << 20))
    least = min(budget for budget in budgets if simulated_memory(CARD, budget)(graph) <= budget)
    assert graph.peak_bytes + CARD.context_bytes < least <= free
    for needs in (simulated_memory(CARD), simulated_memory(CARD, least)):
        assert 0.995 * least <= needs.least(graph, needs(graph)) <= 1.005 * least
    hopeless = simulated_memory(CARD, graph.peak_bytes)
    assert graph.peak_bytes < hopeless.least(graph, hopeless(graph)) <= hopeless(graph)


def test_a_local_accelerator_needs_segments_and_context(graph: Graph) -> None:
    here = environment("xpu", CARD.memory_bytes, overhead_bytes=CARD.context_bytes)
    needs = local_memory(here)
    assert TABLE_BYTES <= SMALL_SIZE  # or it would keep activations from sharing a segment
    preallocated = with_resident(graph, "fingerprints", [TABLE_BYTES], "other")
    assert needs(graph) == CARD.context_bytes + replay(requests(preallocated)).reserved
    assert needs.within(needs(graph) - (1 << 20))(graph) < needs(graph)  # cached segments are given back
    libraries = with_resident(preallocated, "matrix workspaces", [32 << 20] * 2, "other")
    times = OpTimes(environment=here, seconds={}, workspaces=(32 << 20, 32 << 20))
    needs = local_memory(here, times=times)
    assert needs(graph) == CARD.context_bytes + replay(requests(libraries)).reserved
    cpu = environment("cpu", CARD.memory_bytes, overhead_bytes=CARD.context_bytes)
    assert local_memory(cpu)(graph) == CARD.context_bytes + graph.peak_bytes
