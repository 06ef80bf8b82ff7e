"""Models with quantised base weights: what is built, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cli.options import workload_spec
from autockpt.errors import UsageError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import build
from autockpt.workload.quantised import quantization_of

NF4 = {"load_in_4bit": True}


def spec(**options: Any) -> WorkloadSpec:
    return WorkloadSpec(**({"model": "llama-tiny", "lora": 4, "batch_size": 2, "seq_len": 32} | options))


def test_four_bits_are_qloras() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    workload = build(spec(load_in_4bit=True, dtype="bf16"))
    layer = workload.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    assert type(layer) is bnb.nn.Linear4bit
    assert layer.weight.quant_type == "nf4" and layer.weight.quant_state.nested
    assert layer.compute_dtype is torch.bfloat16
    assert layer.quant_state is layer.weight.quant_state
    assert type(workload.model.get_submodule("base_model.model.lm_head")) is torch.nn.Linear
    assert workload.settings["quantization"] == "nf4 twice" and workload.settings["dtype"] == "bf16"
    assert workload.settings["params"] == build(spec()).settings["params"]


def test_weights_are_those_that_quantising_gives_and_no_two_layers_share_memory() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = build(spec(load_in_4bit=True)).model
    layers = [m for m in model.modules() if type(m) is bnb.nn.Linear4bit]
    storages = [layer.weight.untyped_storage().data_ptr() for layer in layers]
    assert len(set(storages)) == len(layers) > 7
    whole = bnb.functional.dequantize_4bit(layers[0].weight.data, layers[0].weight.quant_state)
    assert tuple(whole.shape) == (layers[0].out_features, layers[0].in_features)
    assert 0.015 < float(whole.std()) < 0.025


def test_eight_bits_and_a_file_of_settings(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    assert build(spec(load_in_8bit=True)).settings["quantization"] == "int8"
    file = tmp_path / "q.yaml"
    file.write_text("load_in_4bit: true\nbnb_4bit_quant_type: fp4\nllm_int8_skip_modules: [down_proj]\n")
    given = workload_spec({"model": "llama-tiny", "lora": 4, "quantization": str(file)})
    workload = build(given)
    layers = {n.rpartition(".")[2]: type(m) for n, m in workload.model.named_modules()}
    assert workload.settings["quantization"] == "fp4"
    assert layers["up_proj"] is bnb.nn.Linear4bit and layers["down_proj"] is torch.nn.Linear


@pytest.mark.parametrize("options", [{}, {"model": "gpt2-tiny"}], ids=str)
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_training_moves_adapters_alone(options: dict[str, Any], bits: str) -> None:
    pytest.importorskip("bitsandbytes")
    workload = build(spec(**{bits: True}, **options))
    before = {n: p.detach().clone() for n, p in workload.model.named_parameters()}
    for _ in range(2):
        workload.cycle()
    moved = {n for n, p in workload.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all("lora_" in name for name in moved)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "exclude one another"),
        ({"quantization": {"quant_method": "torchao"}}, "torchao cannot be planned for"),
        ({"quantization": {"bnb_4bit_quant_type": "nf4"}}, "neither 4 nor 8 bits"),
        ({"quantization": {"load_in_4bit": "perhaps"}}, "no configuration"),
        ({"quantization": {"load_in_8bit": True, "llm_int8_has_fp16_weight": True}}, "keeps the weights whole"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match=says):
        quantization_of(spec(**options), torch.bfloat16)


def test_quantised_weights_without_adapters_cannot_be_trained() -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match="--lora 16"):
        build(spec(load_in_4bit=True, lora=None))


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match="need the package bitsandbytes"):
        quantization_of(spec(load_in_4bit=True), torch.bfloat16)


def test_a_file_that_holds_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    file.write_text("- 4\n")
    with pytest.raises(UsageError, match="holds no settings"):
        workload_spec({"model": "llama-tiny", "quantization": str(file)})
