"""Units are found on the architectures people train, however the model is wrapped."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.errors import PlanError
from autockpt.schema.graph import Unit
from autockpt.workload import discover_units, fingerprint
from autockpt.workload.units import class_name, module_of, structure_key

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "pad_token_id": 0,
}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 99}
VISION = BASE | {"image_size": 32, "patch_size": 8}
A, M = "attention", "mlp"

# model type, configuration, names of the first and the last block, number of blocks, of kinds of blocks, and the
# sub-units of the last block.
CASES: list[Any] = [
    ("llama", BASE, "layers.0", "layers.2", 3, 1, {"self_attn": A, "mlp": M}),
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4}, "h.0", "h.2", 3, 1, {"attn": A, "mlp": M}),
    ("qwen2_moe", BASE, "layers.0", "layers.2", 3, 1, {"self_attn": A, "mlp": M}),
    ("gpt_neox", BASE, "layers.0", "layers.2", 3, 1, {"attention": A, "mlp": M}),
    ("mamba", {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 99}, "layers.0", "layers.2", 3, 1, {}),
    ("bert", BASE, "encoder.layer.0", "encoder.layer.2", 3, 1, {"attention": A, "intermediate": M, "output": M}),
    ("modernbert", BASE, "layers.0", "layers.2", 3, 2, {"attn": A, "mlp": M}),
    ("albert", BASE | {"embedding_size": 16}, *["encoder.albert_layer_groups.0.albert_layers.0"] * 2, 1, 1,
     {"attention": A}),
    ("t5", T5, "encoder.block.0", "decoder.block.2", 5, 4,
     {"layer.0.SelfAttention": A, "layer.1.EncDecAttention": A, "layer.2.DenseReluDense": M}),
    ("bart", ENCODER_DECODER, "encoder.layers.0", "decoder.layers.2", 5, 2, {"self_attn": A, "encoder_attn": A}),
    ("vit", VISION, "layers.0", "layers.2", 3, 1, {"attention": A, "mlp": M}),
    ("swin", {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
     "encoder.layers.0.blocks.0", "encoder.layers.1.blocks.1", 4, 4, {"attention": A, "mlp": M}),
    ("resnet", {"hidden_sizes": [8, 16], "depths": [1, 3], "embedding_size": 8}, "encoder.stages.0.layers.0",
     "encoder.stages.1.layers.2", 4, 3, {}),
    ("mobilenet_v2", {"depth_multiplier": 0.35}, "layer.0", "layer.15", 16, 10, {}),
    ("clip", {"text_config": BASE, "vision_config": VISION}, "text_model.encoder.layers.0",
     "vision_model.encoder.layers.2", 6, 2, {"self_attn": A, "mlp": M}),
]  # fmt: skip


def tiny_llama(**config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(BASE | config)))


def blocks(model: nn.Module) -> list[Unit]:
    return [u for u in discover_units(model) if u.role == "block"]


def names(model: nn.Module) -> list[str]:
    return [u.name for u in blocks(model)]


@pytest.mark.parametrize(("model_type", "config", "first", "last", "count", "kinds", "children"), CASES)
def test_transformers_architectures(
    model_type: str, config: dict[str, Any], first: str, last: str, count: int, kinds: int, children: dict[str, str]
) -> None:
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **config))
    units = discover_units(model)
    found = [u for u in units if u.role == "block"]
    assert (found[0].name, found[-1].name, len(found)) == (first, last, count)
    assert units[: len(found)] == tuple(found)
    if model_type != "mobilenet_v2":
        assert len({u.kind for u in found}) == kinds
    assert {u.name.removeprefix(last + "."): u.role for u in units if u.parent == last} == children
    for unit in units:
        assert type(module_of(model, unit.name)).__name__ == unit.cls


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)


class Block(nn.Module):
    """A residual block with attention heads in a list, as tutorials write it."""

    def __init__(self, width: int = 8, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.sa = MultiHeadAttention(width)
        self.ffwd = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        if experts:
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Head(8)) for _ in range(experts))


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(width, 4) for _ in range(3))


class MultiHeadAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(width) for _ in range(2))
        self.proj = nn.Linear(8, width)


class Model(nn.Module):
    def __init__(self, *members: nn.Module, **named: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        if members:
            self.blocks = nn.Sequential(*members)
        for name, module in named.items():
            setattr(self, name, module)
        self.head = nn.Linear(8, 10)


def test_plain_blocks_are_not_descended_into_heads_or_experts() -> None:
    model = Model(Block(), Block(experts=3))
    assert names(model) == ["blocks.0", "blocks.1"]
    roles = {u.name: u.role for u in discover_units(model) if u.parent == "blocks.0"}
    assert roles == {"blocks.0.sa": "attention", "blocks.0.ffwd": "mlp"}
    assert len({u.kind for u in blocks(model)}) == 2


def test_stages_are_descended_and_kept_apart() -> None:
    model = nn.Module()
    model.layer1 = nn.Sequential(Residual(), Residual())
    model.layer2 = nn.Sequential(Residual(), Residual())
    assert names(model) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert [u.kind for u in blocks(model)] == [0, 0, 1, 1]  # the same modules at another resolution cost otherwise


@pytest.fixture(scope="module")
def wrappers() -> dict[str, nn.Module]:
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    per_layer = tiny_llama()
    for i, layer in enumerate(per_layer.model.layers):  # type: ignore[union-attr,arg-type]
        per_layer.model.layers[i] = torch.compile(layer)  # type: ignore[union-attr,operator,index]
    ac = tiny_llama()
    ac.model.layers[1] = checkpoint_wrapper(ac.model.layers[1])  # type: ignore[union-attr,operator,index]
    peft = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    return {
        "compile": torch.compile(tiny_llama()),  # type: ignore[dict-item]
        "compiled layers": per_layer,
        "data parallel": nn.DataParallel(tiny_llama()),
        "checkpoint wrapper": ac,
        "peft": peft,
        "compiled peft": torch.compile(peft),  # type: ignore[dict-item]
    }


def test_wrappers_change_neither_names_nor_fingerprint(wrappers: dict[str, nn.Module]) -> None:
    plain = discover_units(tiny_llama())
    for wrapper, model in wrappers.items():
        units = discover_units(model)
        assert [(u.name, u.cls, u.role, u.parent) for u in units] == [
            (u.name, u.cls, u.role, u.parent) for u in plain
        ], wrapper
        assert fingerprint(units) == fingerprint(plain)
        for unit in units:
            assert type(module_of(model, unit.name)).__name__ == unit.cls


def test_unknown_and_ambiguous_names_are_errors() -> None:
    with pytest.raises(PlanError):
        module_of(tiny_llama(), "model.layers.9")
    with pytest.raises(PlanError) as refused:
        module_of(tiny_llama(), "base_model.model.model.layers.0")
    assert "write 'model.layers.0'" in refused.value.remedy
    with pytest.raises(PlanError):
        module_of(nn.Transformer(8, 2, 1, 1, 16), "layers.0")


def test_fingerprint_tells_structures_apart() -> None:
    assert fingerprint(discover_units(tiny_llama())) != fingerprint(discover_units(tiny_llama(num_hidden_layers=2)))
    units = discover_units(tiny_llama())
    assert fingerprint(units) == fingerprint(reversed(units))
    assert len(fingerprint(units)) == 12


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("model.layers.*", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("model.layers.1-2.mlp, lm_head", ["model.layers.1.mlp", "model.layers.2.mlp", "lm_head"]),
        ("**.mlp", ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"]),
    ],
)
def test_patterns_name_any_modules_however_the_model_is_wrapped(
    patterns: str, expected: list[str], wrappers: dict[str, nn.Module]
) -> None:
    for model in (tiny_llama(), wrappers["peft"], wrappers["compiled layers"]):
        assert [u.name for u in discover_units(model, patterns) if u.role == "block"] == expected


def test_fsdp2_renames_classes_in_place() -> None:
    class FSDPLinear(nn.Linear):
        pass

    class FSDPThing(nn.Module):
        pass

    assert class_name(FSDPLinear(1, 1)) == "Linear"
    assert class_name(FSDPThing()) == "FSDPThing"


# --- two units share a kind exactly when their ops cost the same


def layer(**attributes: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (layer(layer_idx=0, layer_id=0, layer_number=1), layer(layer_idx=5, layer_id=5, layer_number=6), True),
        (layer(name="layers.1.attn"), layer(name="layers.12.attn"), True),
        (nn.Linear(4, 4), nn.Linear(4, 5), False),
        (nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), False),
        (nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), False),
        (nn.Linear(4, 4), nn.Linear(4, 4, bias=False), False),
        (layer(sliding_window=16), layer(sliding_window=None), False),
        (layer(kind="full"), layer(kind="sliding"), False),
        (nn.Conv2d(4, 4, 1, stride=1), nn.Conv2d(4, 4, 1, stride=2), False),
    ],
)
def test_layers_are_the_same_where_their_ops_are(one: nn.Module, other: nn.Module, equal: bool) -> None:
    assert (structure_key(one) == structure_key(other)) == equal


def test_what_the_config_says_about_this_layer_matters() -> None:
    config = SimpleNamespace(num_hidden_layers=3, layer_types=["sliding", "full", "sliding"])
    a, b, c = (structure_key(layer(layer_idx=i, config=config)) for i in range(3))
    assert a == c != b
