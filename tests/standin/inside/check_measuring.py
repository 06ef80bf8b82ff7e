"""Real steps on the stand-in: limits, running out of memory and what is left afterwards, a search in this process."""

from itertools import cycle

import pytest
import torch

import autockpt
from autockpt.cost import local_memory
from autockpt.devices import get_device
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring import StepRunner, environment_of
from autockpt.runtime import attach
from autockpt.schema import OFFLOAD, RECOMPUTE, WorkloadSpec, parse_choice
from autockpt.tracing import Tracer
from autockpt.workload import Step, build
from tests.errors import raises
from tests.standin.inside import scenarios
from tests.standin.inside.scenarios import ALL, Model

standin = torch.get_device_module("standin")
OFFLOAD_ALL = {f"blocks.{n}": OFFLOAD for n in range(4)}
RECOMPUTE_ALL = {f"blocks.{n}": RECOMPUTE for n in range(4)}


def _workload(rows: int = 2048) -> Step:
    torch.manual_seed(0)
    model = Model().to("standin")
    batch = torch.randn(rows, 64).to("standin")
    return Step(model, batch, loss=lambda m, x: m(x), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def _bits(workload: Step) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in workload.model.parameters()] + [standin.get_rng_state(), torch.get_rng_state()]


JOBS = [
    WorkloadSpec(model="llama-tiny", batch_size=16, seq_len=256, autocast="bf16"),
    WorkloadSpec(model="gpt2-tiny", batch_size=16, seq_len=128),  # with dropout
    WorkloadSpec(model="llama-tiny", batch_size=16, seq_len=128),
    WorkloadSpec(model="qwen3-tiny", batch_size=16, seq_len=256, lora=8),
    WorkloadSpec(model="t5-tiny", batch_size=16, seq_len=128, accumulate=2),
    WorkloadSpec(model="mixtral-tiny", batch_size=16, seq_len=128, autocast="bf16"),
]
MIXTURES = (
    *("save", "recompute", "offload", "remake", "selective", "recompute_offload", "offload offload offload save"),
    *("save offload offload offload", "save recompute", "offload recompute recompute_offload save"),
    *("remake save selective offload", "save save save offload", "save offload", "save remake remake recompute"),
)


@pytest.fixture(params=("lazy", "random:3") if ALL else ("random:3",))
def schedule(request: pytest.FixtureRequest) -> None:
    standin.set_schedule(request.param)


def test_peaks_are_the_allocators_and_plans_lower_them(schedule):
    runner = StepRunner(_workload(), get_device("standin"))
    plain = runner.measure({}, steps=1)
    assert plain.times and plain.peak_bytes >= 8 << 20
    assert runner.measure({}, steps=1).peak_bytes == plain.peak_bytes
    for choices in (OFFLOAD_ALL, RECOMPUTE_ALL):
        assert runner.measure(choices, steps=1).peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("job", JOBS if ALL else JOBS[:1], ids=lambda job: job.model)
def test_a_predicted_peak_is_the_allocators(job):
    """Every choice, and mixtures that leave neighbours of all kinds: what searches go by before they measure."""
    with Tracer.from_spec(job, device="standin") as tracer:
        units = [unit.name for unit in tracer.units if unit.role == "block"]
        plans = [dict(zip(units, cycle(map(parse_choice, kinds.split())), strict=False)) for kinds in MIXTURES]
        plans = plans if ALL else plans[::3]
        graphs = [tracer.trace(plan) for plan in plans]
    device = get_device("standin")
    needs, runner = local_memory(environment_of(device)), StepRunner(build(job, "standin"), device)
    assert needs is not None
    for plan, graph in zip(plans, graphs, strict=True):
        measured = runner.measure(plan, steps=1).peak_bytes
        assert abs(needs(graph) - measured) <= max(2 << 20, 0.02 * measured), plan  # one segment of the small pool


@pytest.mark.parametrize("plan", scenarios.PLANS if ALL else ("offload", "mixed"))
def test_a_slow_link_takes_time_and_no_memory(plan):
    """Copies that end at once, and only when somebody waits: the same bytes, and a limit of just these holds."""
    choices = {f"blocks.{n}": choice for n, choice in enumerate(scenarios.PLANS[plan])}
    device, peaks = get_device("standin"), []
    runner = StepRunner(_workload(), device)
    for schedule in ("eager", "copies-late", "lazy"):
        standin.set_schedule(schedule)
        with device.limit(peaks[0].peak_bytes if peaks else None):
            peaks.append(runner.measure(choices, steps=1))
    assert len({(peak.peak_bytes, peak.allocated_bytes) for peak in peaks}) == 1


def _towards_some_inputs(model: Model, x: torch.Tensor) -> None:
    torch.autograd.grad(model(x), list(model.blocks[2].parameters()))  # the units before it are fetched in vain


def _units_alone(model: Model, x: torch.Tensor) -> None:
    for block in model.blocks:
        x = block(x)


@pytest.mark.parametrize("use", (_towards_some_inputs, _units_alone) if ALL else (_towards_some_inputs,))
def test_what_nobody_waits_for_does_not_pile_up(use):
    standin.set_schedule("copies-late")
    model, x, peaks = Model().to("standin"), torch.randn(1024, 64).to("standin"), []
    with attach(model, OFFLOAD_ALL):
        for rounds in (2, 6):
            standin.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            for _ in range(rounds):
                use(model, x)
            peaks.append(torch.accelerator.memory_stats()["active_bytes.all.peak"])
    assert peaks[1] <= peaks[0] + (1 << 20)


def test_out_of_memory_is_told_and_nothing_is_left_behind(schedule):
    workload, device = _workload(), get_device("standin")
    runner = StepRunner(workload, device)
    plain = runner.measure({}, steps=1).peak_bytes
    lean = runner.measure(OFFLOAD_ALL, steps=1).peak_bytes
    before = _bits(workload)
    with device.limit((plain + lean) // 2):
        for _ in range(2):
            with raises(DeviceOutOfMemory, "standin"):
                runner.measure({}, steps=1)
            assert runner.measure(OFFLOAD_ALL, steps=1).peak_bytes <= (plain + lean) // 2
    assert runner.measure({}, steps=1).peak_bytes == plain
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(workload), strict=True))


def test_a_live_search_leaves_the_callers_state():
    workload = _workload(12288)
    before = _bits(workload)
    plan = autockpt.search(workload, budget="70%", trials=2)
    assert plan.status == "measured" and plan.measured is not None
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(workload), strict=True))
