"""What a tracer promises: units, whole graphs, the user's state untouched, and every failure told."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError, GhostError, PlanError, TracingError, WorkloadError
from autockpt.process import Child
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Remake
from autockpt.schema.graph import Graph
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer, trace
from autockpt.tracing.kernels.timeline import bytes_timeline
from autockpt.tracing.process import can_fork
from autockpt.tracing.tracer import in_this_process
from autockpt.workload import Step, build
from tests.children import Say, children, forked, is_gone
from tests.errors import raises
from tests.tracing.reference import Real, mlp, record

pytestmark = pytest.mark.slow

SPEC = WorkloadSpec(model="llama-tiny", autocast="bf16")


def workload(step: Callable[[nn.Module, Any], Tensor] | None = None, **settings: Any) -> Step:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"loss": step or mean_square, "optimizer": optimizer} | settings
    return Step(model, torch.randn(64, 64), **settings)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def traced() -> tuple[Tracer, Graph, Graph]:
    with Tracer.from_spec(SPEC, fallback=False) as tracer:
        blocks = [u.name for u in tracer.units if u.role == "block"]
        plan = {blocks[0]: RECOMPUTE, blocks[1]: OFFLOAD, blocks[2]: SAVE}
        return tracer, tracer.trace(), tracer.trace(plan)


def test_ops_are_in_their_units(traced: tuple[Tracer, Graph, Graph]) -> None:
    _, graph, planned = traced
    per_unit = Counter((op.unit, op.phase) for op in graph.ops)
    forward = {per_unit[u.name, "forward"] for u in graph.blocks()}
    assert len(forward) == 1 and forward != {0}
    assert per_unit[None, "optimizer"] and not per_unit["model.layers.0", "optimizer"]
    again = Counter(op.unit for op in planned.ops if op.phase == "recompute")
    assert set(again) == {"model.layers.0"}
    assert {c.unit for c in planned.copies} == {"model.layers.1"}
    assert {c.direction for c in planned.copies} == {"in", "out"}


def test_kinds_of_storages(traced: tuple[Tracer, Graph, Graph]) -> None:
    _, graph, _ = traced
    real = build(SPEC)
    weights = sum(p.nbytes for p in real.model.parameters())
    gradients = [s for s in graph.storages if s.kind == "gradient" and s.death != s.birth]
    assert sum(s.bytes for s in gradients) >= weights
    assert graph.resident["weights"] == weights
    assert graph.resident["optimizer states"] >= 2 * weights
    assert sum(graph.resident.values()) == graph.resident_bytes
    copies = [s for s in graph.storages if s.kind == "other" and s.birth >= 0]
    assert sum(s.bytes for s in copies) >= weights // 2 * 0.8  # autocast's copies of the matrices


def test_the_users_state_is_untouched() -> None:
    live = workload()
    live.cycle()
    mean_square(live.model, live.batch).backward()
    before = [(p.clone(), p.grad, p.data_ptr()) for p in live.model.parameters()]
    states = str(live.optimizer.state_dict()) if live.optimizer else ""
    random_state = torch.get_rng_state()
    for backend in (Tracer.from_step(live, fallback=False), Tracer(in_this_process(live))):
        with backend as tracer:
            assert tracer.trace({"0": RECOMPUTE}).source == "ghost"
    for parameter, (value, gradient, address) in zip(live.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient and parameter.data_ptr() == address
    assert live.optimizer is not None and str(live.optimizer.state_dict()) == states
    assert torch.equal(torch.get_rng_state(), random_state)


def test_every_way_gives_the_same_graph() -> None:
    plan = {"1": RECOMPUTE}
    live = workload()
    ghost = trace(live, plan)
    inside = Tracer(in_this_process(live)).trace(plan)
    assert inside == ghost
    assert trace(live, plan) == ghost
    real = record(live, plan)
    assert (real.source, real.peak_bytes, real.units) == ("recorded", ghost.peak_bytes, ghost.units)
    assert [(op.target, op.module, op.phase, op.signature) for op in real.ops] == [
        (op.target, op.module, op.phase, op.signature) for op in ghost.ops
    ]
    assert real.peak_bytes == Real(workload(), plan).peak_bytes


def test_a_full_step_has_an_optimizer_phase() -> None:
    live = workload()
    model, batch, optimizer = live.model, live.batch, live.optimizer
    assert optimizer is not None

    def full_step() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    whole = Step(model, batch, optimizer=optimizer, full_step=full_step)
    graph = trace(whole)
    phases = [op.phase for op in graph.ops]
    assert graph.source == "ghost"
    assert phases.index("optimizer") < len(phases) - 1 - phases[::-1].index("forward")
    with pytest.raises(GhostError):
        in_this_process(whole)


def optimized(**flags: Any) -> Step:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    made = flags.pop("made", torch.optim.AdamW)(model.parameters(), **flags)
    return Step(model, torch.randn(2, 512), loss=mean_square, optimizer=made)


def fused() -> Step:
    return optimized(fused=True)


def adafactor() -> Step:
    return optimized(made=torch.optim.Adafactor)


@pytest.mark.parametrize(
    ("factory", "device", "weights"),
    [
        ("optimized", "cuda", 1.0),
        ("fused", "cuda", 0.0),
        ("adafactor", "cuda", 0.25),
        ("fused", "cpu", 0.0),
    ],
)
def test_temporaries_follow_the_optimizers_flags(factory: str, device: str, weights: float) -> None:
    with Tracer.from_spec(WorkloadSpec(model=f"{__name__}:{factory}"), device=device, fallback=False) as tracer:
        graph = tracer.trace()
    first = next(op.index for op in graph.ops if op.phase == "optimizer")
    held = bytes_timeline(graph)[first:]
    assert (held.max() - held[0]) / graph.resident["weights"] == pytest.approx(weights, abs=0.01)


# Failures.


def slipping(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    out.detach().numpy()[0, 0] = 1.0  # a kernel that PyTorch does not know of
    return out.mean()


def broken(model: nn.Module, batch: Tensor) -> Tensor:
    raise ValueError("the batch has 7 columns")


def depends_on_data(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out.mean() if out.mean() > 0 else out.sum()


def test_what_cannot_be_ghost_run_is_recorded_and_said() -> None:
    for step in (slipping, depends_on_data):
        graph = trace(workload(step))
        assert graph.source == "recorded"
        assert "real step" in graph.notes[0]
        if step is slipping:
            assert "ghost memory at " in graph.notes[0] and "test_tracer.py:" in graph.notes[0]
        assert len(graph.units) == 4


def test_an_exception_in_the_users_step_is_told_with_its_place() -> None:
    with pytest.raises(GhostError):
        Tracer.from_step(workload(broken), fallback=False)
    with pytest.raises(WorkloadError):
        Tracer.from_step(workload(broken))


def abort() -> None:
    os.write(2, b"terminate called: no such card\n")
    os.abort()


@pytest.mark.parametrize(
    ("end", "said"),
    [(lambda: os._exit(3), ""), (lambda: os.kill(os.getpid(), signal.SIGKILL), ""), (abort, "no such card")],
)
def test_a_child_that_dies_is_told(end: Callable[[], None], said: str) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        out = mean_square(model, batch)
        end()
        return out

    with raises(GhostError, said):
        Tracer.from_step(workload(step), fallback=False)
    with pytest.raises(TracingError) as caught:
        Tracer.from_step(workload(step))
    assert "Neither ghosts nor a real step" in caught.value.remedy


def test_choices_that_do_not_fit_leave_the_tracer_usable() -> None:
    with Tracer.from_step(workload(), fallback=False) as tracer:
        before = tracer.trace()
        with pytest.raises(PlanError):
            tracer.trace({"nope": RECOMPUTE})
        with pytest.raises((PlanError, ConflictError)):
            tracer.trace({"0": RECOMPUTE, "0.0": RECOMPUTE})
        assert tracer.trace() == before
    with pytest.raises(GhostError):
        tracer.trace()


def test_a_process_that_uses_any_accelerator_is_not_forked(accelerator) -> None:
    assert can_fork() is (sys.platform == "linux")
    accelerator.opened = True
    assert not can_fork()


def test_a_fresh_process_traces_the_same_as_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started where an accelerator is in use, and so must import everything itself. The fork has learned the
    recipes of another layer before."""

    def graph(*before: int) -> Graph:
        spec = WorkloadSpec(model="tests.measuring.sharded_models:whole")
        with Tracer.from_spec(spec, device=torch.device("cpu"), fallback=False) as tracer:
            assert tracer.units[1].kind == tracer.units[2].kind
            return [tracer.trace({tracer.units[number].name: Remake()}) for number in (*before, 2)][-1]

    by_fork = graph(1)
    monkeypatch.setattr("autockpt.tracing.process.Child", Child)
    monkeypatch.setattr("autockpt.tracing.tracer.can_fork", lambda: False)
    assert graph() == by_fork


@pytest.mark.skipif(not can_fork(), reason="the child is only interrupted where it is forked")
def test_an_interrupt_leaves_no_child_behind() -> None:
    def sleepy(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(60)
        return mean_square(model, batch)

    before = children()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Tracer.from_step(workload(sleepy))
    timer.join()
    assert children() == before


@pytest.mark.skipif(not can_fork(), reason="needs a forked child")
def test_the_child_ends_with_its_parent() -> None:
    def parent(say: Say) -> None:
        tracer = Tracer.from_step(workload())
        say(tracer._backend._processes[0].child.pid)
        os.kill(os.getpid(), signal.SIGKILL)

    assert is_gone(forked(parent).receive())
