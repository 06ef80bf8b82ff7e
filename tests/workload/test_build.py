"""Specs become workloads that train: every built-in small shape, every option."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.errors import UsageError
from autockpt.schema.workload import WorkloadSpec
from autockpt.shipped import list_models
from autockpt.workload import Step, build, refuse_simulated
from tests.errors import raises

SMALL = [name for name in list_models() if name.endswith("-tiny")]


def make(model: str = "llama-tiny", **more: Any) -> Step:
    return build(WorkloadSpec(model=model, **more))


def weights(w: Step) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in w.model.named_parameters()}


def config_of(w: Step) -> dict[str, Any]:
    """Without the entry that transformers' classification heads themselves write in forward."""
    return {k: v for k, v in w.model.config.to_dict().items() if k != "problem_type"}  # type: ignore[union-attr,operator]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_shapes_train(name: str) -> None:
    w = make(name)
    before = weights(w)
    config = config_of(w)
    first = w.forward_backward()
    w.release_gradients()
    for _ in range(2):
        w.cycle()
    assert w.model.training and torch.isfinite(first)
    assert w.forward_backward() < first
    assert any(not torch.equal(before[n], p) for n, p in w.model.named_parameters())
    assert config_of(w) == config


def test_the_same_spec_gives_the_same_steps() -> None:
    def after(seed: int) -> dict[str, torch.Tensor]:
        w = make("gpt2-tiny", seed=seed, batch_size=2, seq_len=16)  # with dropout
        w.cycle()
        return weights(w)

    a, b, c = after(1), after(1), after(2)
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not all(torch.equal(a[n], c[n]) for n in a)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dtype_is_that_of_all_weights(dtype: str) -> None:
    w = make(dtype=dtype, batch_size=2, seq_len=8)
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert {p.dtype for p in w.model.parameters()} == {expected}
    assert torch.isfinite(w.forward_backward())
    assert w.settings["dtype"] == dtype
    assert make("vit-tiny", dtype=dtype).batch["pixel_values"].dtype == expected


@pytest.mark.parametrize("options", [{"scaler": True, "dtype": "fp16"}, {"scaler": True, "optimizer": "none"}])
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**options)


def test_configurations_of_other_models(tmp_path: Path) -> None:
    """A directory (with the class it names), a bare config.json, remote code left alone, and defaults stated."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config.num_labels = 3
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    w = make(str(tmp_path), batch_size=2, seq_len=16)
    assert w.settings["architecture"] == "BertForSequenceClassification"
    assert w.batch["labels"].shape == (2,) and torch.isfinite(w.forward_backward())

    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config.to_dict() | {"architectures": ["BertModel"]}))
    w = make(str(file), batch_size=1, seq_len=8)
    assert w.settings["architecture"] == "BertForMaskedLM"
    assert any("No loss of BertModel is known" in note for note in w.notes)


# --- what only simulated hardware can follow


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"shard": 8}, "`shard: 8`"),
        ({"shard": "2x4 kept"}, "`shard: 2x4 kept`"),
        ({"ddp": "buckets"}, "`ddp: buckets`"),
        ({"master_weights": True}, "`master_weights: true`"),
        ({"keep_gradients": True}, "`keep_gradients: true`"),
    ],
)
def test_a_real_step_refuses_them_by_name(given: dict[str, object], option: str) -> None:
    spec = WorkloadSpec.model_validate({"model": "tests.tracing.kernels.cuda_models:causal_fp32"} | given)
    for attempt in (refuse_simulated, build):
        with raises(UsageError, option) as caught:
            attempt(spec)
        assert "--hardware" in caught.value.remedy
