"""A live adapted model on a base in 4 bits: the ghosts of what loading and adapting it would give."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.schema import Graph, WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.tracing.run import GhostRun
from autockpt.tracing.tracer import trace
from autockpt.workload import Step, build
from autockpt.workload.four_bits import can_be_in_four_bits, compute_dtype, in_four_bits

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

CASES: dict[str, dict[str, Any]] = {
    "Conv1D with biases": {"model": "gpt2-tiny"},
    "encoder and decoder, DoRA": {"model": "t5-tiny", "lora_targets": "all-linear", "lora_dora": True},
    "head trained whole, autocast": {"lora_modules_to_save": "lm_head", "autocast": "bf16"},
}


def spec(**options: Any) -> WorkloadSpec:
    common = {"model": "llama-tiny", "lora": 4, "batch_size": 2, "seq_len": 32, "dtype": "bf16"}
    return WorkloadSpec(**(common | options))


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_ops_and_bytes_are_those_of_a_model_that_is_built_so(options: dict[str, Any]) -> None:
    live = build(spec(**options))
    with Tracer.from_step(live, change=in_four_bits) as tracer:
        graph = tracer.trace()
    with Tracer.from_spec(spec(**options, load_in_4bit=True), fallback=False) as tracer:
        built = tracer.trace()
    assert targets(graph) == targets(built)
    assert graph.resident == built.resident and graph.peak_bytes == built.peak_bytes


@pytest.mark.slow
def test_in_this_process_too_and_the_live_model_stays_as_it_is() -> None:
    live = build(spec())
    live.cycle()
    weights = {name: p.detach().clone() for name, p in live.model.named_parameters()}
    kinds = [(name, type(module)) for name, module in live.model.named_modules()]
    state, held = torch.get_rng_state(), [*live.optimizer.state] if live.optimizer else []
    run = GhostRun(writable=True)
    run.copy(live, in_four_bits)
    assert {type(m).__name__ for m in run.workload.model.modules()} >= {"Linear4bit"}
    run.trace({})
    with Tracer.from_step(live, change=in_four_bits) as tracer:
        tracer.trace()
    assert [(name, type(module)) for name, module in live.model.named_modules()] == kinds
    assert all(torch.equal(p, weights[name]) for name, p in live.model.named_parameters())
    assert live.optimizer and [*live.optimizer.state] == held and torch.equal(torch.get_rng_state(), state)


def test_what_is_trained_and_its_types_stay() -> None:
    step = build(spec())
    for name, parameter in step.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float16)
            parameter.requires_grad_("layers.0." not in name)
    trained = {name for name, p in step.model.named_parameters() if p.requires_grad}
    made = in_four_bits(step)
    assert {name for name, p in made.model.named_parameters() if p.requires_grad} == trained
    assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {torch.float16}
    assert made.optimizer is not None
    assert {id(p) for group in made.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in made.model.parameters() if p.requires_grad
    }


def test_products_are_in_the_type_of_autocast_or_of_the_weights() -> None:
    assert compute_dtype(build(spec())) is torch.bfloat16
    assert compute_dtype(build(spec(dtype="fp32"))) is torch.float32
    assert compute_dtype(build(spec(dtype="fp32", autocast="fp16"))) is torch.float16


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(spec()).model
    assert can_be_in_four_bits(model)
    assert not can_be_in_four_bits(build(spec(load_in_4bit=True)).model)
    assert not can_be_in_four_bits(build(spec(load_in_8bit=True)).model)
    assert not can_be_in_four_bits(build(spec(lora=None)).model)
    own = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))
    assert not can_be_in_four_bits(own)
    trained = build(spec(lora_modules_to_save="down_proj")).model
    assert not can_be_in_four_bits(trained)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert not can_be_in_four_bits(model)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_live_model_that_is_quantised_is_traced_as_one_that_is_described(bits: str) -> None:
    wanted = spec(**{bits: True})
    live = build(wanted)
    graph = trace(Step(live.model, live.batch, optimizer=live.optimizer))
    with Tracer.from_spec(wanted, fallback=False) as tracer:
        described = tracer.trace()
    assert targets(graph) == targets(described)
    assert graph.resident_bytes == pytest.approx(described.resident_bytes, abs=2048)  # bitsandbytes' table of codes
