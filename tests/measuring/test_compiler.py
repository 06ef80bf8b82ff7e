"""Compiled steps: what is compiled, how often, that nothing is left behind, and what is refused."""

import pytest
import torch
from torch import nn

from autockpt.devices import get_device
from autockpt.errors import ConflictError, MeasurementError, UsageError
from autockpt.measuring import StepRunner
from autockpt.measuring.compiler import Compiler, missing
from autockpt.schema import RECOMPUTE, Choice, CompileMode
from autockpt.schema.choices import CompileBudget
from tests.errors import raises
from tests.measuring.small_workloads import BLOCKS, RECOMPUTE_ALL, Stack, make_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

CHEAP = "aot_eager_decomp_partition"
TIGHT: Choice = CompileBudget(fraction=0.1)
TIGHT_ALL: dict[str, Choice] = {f"layers.{i}": TIGHT for i in range(BLOCKS)}


def runner_of(mode: CompileMode, model: nn.Module | None = None) -> StepRunner:
    workload = make_workload(model or Stack(dropout=0.0))  # type: ignore[arg-type]
    return StepRunner(workload, get_device("cpu"), compiler=Compiler(mode, "cpu", backend=CHEAP))


@pytest.mark.parametrize("mode", ["layers", "model"])
def test_plans_take_fewer_bytes_and_are_compiled_once(mode: CompileMode):
    """The compiler guards on forwards inside a graph, so a plan is attached by the same objects every time."""
    runner = runner_of(mode)
    model, mixed = runner.workload.model, {**TIGHT_ALL, "layers.0": RECOMPUTE}
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    plans = {"none": {}, "all": RECOMPUTE_ALL, "tight": TIGHT_ALL, "mixed": mixed}
    plain, *others = measured = [runner.measure(plan, steps=1) for plan in plans.values()]
    assert all(one.peak_bytes < plain.peak_bytes for one in others)
    # the first layer's input needs no gradient: another graph
    assert {one.graphs for one in measured[:3]} == {2 if mode == "layers" else 1}
    assert all(one.compile_seconds > 0 for one in measured[:3])
    times = runner.compiler.times  # type: ignore[union-attr]
    runner.compare(plans, rounds=2)
    assert runner.measure(mixed, steps=1).compile_seconds == 0
    assert runner.compiler.times == times  # type: ignore[union-attr]
    for name, module in model.named_modules():
        assert module.__dict__ == before[name]
    assert torch._functorch.config.activation_memory_budget == 1.0
    assert torch._functorch.config.joint_custom_pass is None


def test_a_budget_is_refused_where_random_numbers_are_drawn():
    runner = runner_of("layers", Stack(dropout=0.1))
    with raises(ConflictError, "pytorch#190758"):
        runner.measure(TIGHT_ALL, steps=1)
    assert runner.measure(RECOMPUTE_ALL, steps=1).graphs == 2
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_two_budgets_in_one_graph_are_refused():
    runner = runner_of("model")
    with raises(ConflictError):
        runner.measure({**TIGHT_ALL, "layers.2": CompileBudget(fraction=0.4)}, steps=1)


def test_too_many_kinds_of_layers_are_noticed():
    runner = runner_of("layers")
    plan = {name: CompileBudget(fraction=0.1 * (i + 1)) for i, name in enumerate(TIGHT_ALL)}
    with torch._dynamo.config.patch(recompile_limit=3), raises(MeasurementError, "recompile_limit"):
        runner.measure(plan, steps=1)


def test_a_layer_that_runs_eagerly_is_noticed():
    model = Stack(dropout=0.0)
    for layer in model.layers:
        layer.forward = torch.compiler.disable(layer.forward)
    with raises(MeasurementError):
        runner_of("layers", model).measure({}, steps=1)


def test_a_model_that_is_compiled_already_is_refused():
    runner = runner_of("layers")
    runner.workload.model.layers[1].compile(backend=CHEAP)  # type: ignore[index]
    with raises(UsageError):
        runner.measure({}, steps=1)


def test_where_there_is_no_compiler_that_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "g++" in missing("cpu")
    with raises(UsageError, "C++"):
        Compiler("layers", "cpu")


@pytest.mark.skipif(bool(missing("cpu")), reason="no C++ compiler")
def test_the_real_compiler_keeps_the_budget_of_each_layer():
    runner = StepRunner(make_workload(Stack(dropout=0.0)), get_device("cpu"), compiler=Compiler("layers", "cpu"))
    plain = runner.measure({}, steps=1)
    tight = runner.measure({"layers.1": TIGHT, "layers.2": TIGHT}, steps=1)
    assert tight.peak_bytes < plain.peak_bytes and tight.graphs == plain.graphs + 1
