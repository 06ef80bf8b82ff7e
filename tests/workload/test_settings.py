"""Facts about a workload, for people and for files."""

from __future__ import annotations

import json

import torch
from torch import nn

from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Workload, build
from autockpt.workload.settings import describe


def test_a_built_workload() -> None:
    settings = build(WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=16, accumulate=3, autocast="bf16")).settings
    expected = {
        "model": "llama-tiny",
        "architecture": "LlamaForCausalLM",
        "params": 250_432,
        "trainable_params": 250_432,
        "dtype": "fp32",
        "autocast": "bf16",
        "batch_size": 2,
        "seq_len": 16,
        "tokens": 96,
        "accumulate": 3,
        "optimizer": "AdamW",
        "attention": "sdpa",
        "device": "cpu",
    }
    assert expected.items() <= settings.items()
    json.dumps(settings)


def test_the_weights_type_is_that_of_most_numbers() -> None:
    model = nn.Sequential(nn.Linear(100, 100, dtype=torch.bfloat16), nn.LayerNorm(100))
    settings = describe(Workload(model, torch.ones(5, 100), lambda m, b: m(b).sum()), extra=1)
    assert settings["dtype"] == "bf16" and settings["batch_size"] == 5 and settings["extra"] == 1
    assert settings["seq_len"] is None and settings["tokens"] is None and settings["optimizer"] == "none"
