"""Models with quantised base weights: what is built, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.errors import UsageError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import build
from autockpt.workload.quantised import quantization_of


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


def test_weights_are_the_quantised_ones_and_share_no_memory() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = build(spec(load_in_4bit=True)).model
    layers = [m for m in model.modules() if type(m) is bnb.nn.Linear4bit]
    storages = [layer.weight.untyped_storage().data_ptr() for layer in layers]
    assert len(set(storages)) == len(layers) > 7
    whole = bnb.functional.dequantize_4bit(layers[0].weight.data, layers[0].weight.quant_state)
    assert tuple(whole.shape) == (layers[0].out_features, layers[0].in_features)
    assert 0.015 < float(whole.std()) < 0.025


@pytest.mark.parametrize("options", [{}, {"model": "gpt2-tiny"}], ids=str)
@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"quantization": {"load_in_8bit": True}}], ids=["4", "8"])
def test_training_moves_adapters_alone(options: dict[str, Any], bits: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    workload = build(spec(**bits, **options))
    before = {n: p.detach().clone() for n, p in workload.model.named_parameters()}
    for _ in range(2):
        workload.cycle()
    moved = {n for n, p in workload.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all("lora_" in name for name in moved)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": {"load_in_4bit": True, "load_in_8bit": True}},
        {"quantization": {"quant_method": "hqq"}},
        {"quantization": {"quant_method": "torchao"}},
        {"quantization": {"bnb_4bit_quant_type": "nf4"}},
        {"quantization": {"load_in_4bit": "perhaps"}},
        {"quantization": {"load_in_8bit": True, "llm_int8_has_fp16_weight": True}},
    ],
)
def test_refusals(options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError):
        quantization_of(spec(**options), torch.bfloat16)


def packed(folder: Path, **settings: Any) -> str:
    """A model's folder as on a hub, whose config.json says how its weights are quantised."""
    config: Any = build(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8)).model.config
    config.quantization_config = settings
    config.save_pretrained(folder)
    return str(folder)


def test_a_models_own_quantization_is_taken_or_refused(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "_load_in_4bit": True}
    model = packed(tmp_path / "fp4", **own)
    workload = build(spec(model=model))
    assert workload.settings["quantization"] == "fp4"
    assert type(workload.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")) is bnb.nn.Linear4bit
    with pytest.raises(UsageError):
        build(spec(model=model, load_in_4bit=True))
    with pytest.raises(UsageError):
        build(spec(model=model, lora=None))
    with pytest.raises(UsageError):
        build(spec(model=packed(tmp_path / "gptq", quant_method="gptq", bits=4)))


def test_what_peft_turns_to_fp32_is_and_is_said() -> None:
    pytest.importorskip("bitsandbytes")
    plain, prepared = (build(spec(load_in_4bit=True, dtype="bf16", prepare_kbit=on)) for on in (False, True))
    for workload, dtype in ((plain, torch.bfloat16), (prepared, torch.float32)):
        model: Any = workload.model
        assert model.get_submodule("base_model.model.lm_head").weight.dtype is dtype
        assert model.get_submodule("base_model.model.model.norm").weight.dtype is dtype
        assert not model.is_gradient_checkpointing
    assert any("add `prepare_kbit`" in note for note in plain.notes)
    assert any("in fp32, " in note and "use_gradient_checkpointing=False" in note for note in prepared.notes)
    with pytest.raises(UsageError):
        build(WorkloadSpec(model="llama-tiny", prepare_kbit=True))
