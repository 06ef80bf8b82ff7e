"""Models with quantised base weights: what is built, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cli.options import workload_spec
from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import load_hardware
from autockpt.tracing import Tracer, tracer_for
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


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_biases_have_the_models_type_as_loaded_ones_do(bits: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = build(spec(model="gpt2-tiny", dtype="bf16", **{bits: True})).model
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("bias")} == {torch.bfloat16}


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
        ({"quantization": {"quant_method": "hqq"}}, "hqq cannot be planned for"),
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


def packed(folder: Path, **settings: Any) -> str:
    """A model's folder as on a hub, whose config.json says how its weights are quantised."""
    config: Any = build(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8)).model.config
    config.quantization_config = settings
    config.save_pretrained(folder)
    return str(folder)


def test_a_models_own_quantization_is_taken_as_it_is_or_refused_by_name(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "_load_in_4bit": True}
    model = packed(tmp_path / "fp4", **own)
    workload = build(spec(model=model))
    assert workload.settings["quantization"] == "fp4"
    assert type(workload.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")) is bnb.nn.Linear4bit
    with pytest.raises(UsageError, match="comes quantised by bitsandbytes already, so --load-in-8bit"):
        build(spec(model=model, load_in_8bit=True))
    with pytest.raises(UsageError, match="quantised weights cannot be trained"):
        build(spec(model=model, lora=None))
    with pytest.raises(UsageError, match="comes quantised by gptq, which cannot be planned for"):
        build(spec(model=packed(tmp_path / "gptq", quant_method="gptq", bits=4)))


def test_torchaos_weights_are_those_that_quantising_gives(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = packed(tmp_path, **torchao_settings("Int8WeightOnlyConfig"))
    for workload in (build(spec(quantization=torchao_settings("Int8WeightOnlyConfig"))), build(spec(model=model))):
        layers = [
            module
            for module in workload.model.modules()
            if type(module) is torch.nn.Linear and isinstance(module.weight, torchao.Int8Tensor)
        ]
        insides = {layer.weight.qdata.untyped_storage().data_ptr() for layer in layers}
        assert len(insides) == len(layers) == 28 and workload.settings["quantization"] == "torchao Int8Tensor"
        assert 0.015 < float(layers[0].weight.dequantize().std()) < 0.025
        assert not any("--prepare-kbit" in note for note in workload.notes)
    for broken in ({"_type": "Int8Weights"}, {"_data": {"granularity": 3}}):
        with pytest.raises(UsageError, match=r"Int8WeightOnlyConfig\(\)\)\.to_dict\(\)"):
            quantization_of(spec(quantization=torchao_settings("Int8WeightOnlyConfig", **broken)), torch.bfloat16)
    with pytest.raises(WorkloadError, match=r"cannot quantise Linear \(64, 64\) on cpu"):
        build(spec(quantization=torchao_settings("Int4WeightOnlyConfig", _data={"group_size": 32})))  # CUDA's kernels


def torchao_settings(kind: str, **more: Any) -> dict[str, Any]:
    how = {"_type": kind, "_version": 2, "_data": {}} | more
    return {"quant_method": "torchao", "quant_type": {"default": how}}


@pytest.mark.parametrize("saved", ["whole", "packed"])
def test_trained_weights_are_quantised_or_read_packed(saved: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import transformers

    build(WorkloadSpec(model="llama-tiny", batch_size=1, seq_len=8)).model.save_pretrained(tmp_path)
    wanted: dict[str, Any] = NF4
    if saved == "packed":
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how)
        model.save_pretrained(tmp_path)
        wanted = {}
    workload = build(spec(model=str(tmp_path), weights=True, **wanted))
    assert workload.settings["quantization"].startswith("nf4") and workload.settings["weights"] == "trained"
    workload.cycle()


def test_what_peft_turns_to_fp32_is_and_is_said() -> None:
    pytest.importorskip("bitsandbytes")
    plain, prepared = (build(spec(load_in_4bit=True, dtype="bf16", prepare_kbit=on)) for on in (False, True))
    for workload, dtype in ((plain, torch.bfloat16), (prepared, torch.float32)):
        model: Any = workload.model
        assert model.get_submodule("base_model.model.lm_head").weight.dtype is dtype
        assert model.get_submodule("base_model.model.model.norm").weight.dtype is dtype
        assert not model.is_gradient_checkpointing
    assert any("add --prepare-kbit" in note for note in plain.notes)
    assert any("in fp32, " in note and "use_gradient_checkpointing=False" in note for note in prepared.notes)
    with pytest.raises(UsageError, match="--prepare-kbit freezes all"):
        build(WorkloadSpec(model="llama-tiny", prepare_kbit=True))


def test_experts_that_stay_whole_are_named() -> None:
    pytest.importorskip("bitsandbytes")
    said = [build(spec(model=model, load_in_4bit=True)).notes for model in ("mixtral-tiny", "llama-tiny")]
    experts, none = (tuple(note for note in notes if "is not quantised" in note) for notes in said)
    assert len(experts) == 1 and experts[0].startswith("MixtralExperts is not quantised, ")
    assert none == ()


@pytest.mark.slow
def test_dora_on_eight_bits_is_for_cards() -> None:
    pytest.importorskip("bitsandbytes")
    asked = spec(load_in_8bit=True, lora_dora=True)
    with tracer_for(load_hardware("rtx4090"), asked, fallback=False) as tracer:
        assert tracer.trace().source == "ghost"
    with pytest.raises(UsageError, match="second step on a CPU"):
        Tracer.from_spec(asked)


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    for package, options in {"bitsandbytes": NF4, "torchao": {"quantization": torchao_settings("X")}}.items():
        with pytest.raises(UsageError, match=f"need the package {package}"):
            quantization_of(spec(**options), torch.bfloat16)


def test_a_file_that_holds_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    file.write_text("- 4\n")
    with pytest.raises(UsageError, match="holds no settings"):
        workload_spec({"model": "llama-tiny", "quantization": str(file)})
