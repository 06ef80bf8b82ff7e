"""Small models for whole searches, which take about as long as they have layers."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from autockpt.schema import WorkloadSpec
from autockpt.workload import Step, build

TWO_LAYERS = str(Path(__file__).with_name("two_layers"))
"""llama-tiny with two layers instead of four: the folder of its config.json."""
LOGITS = str(Path(__file__).with_name("logits"))
"""Two thin layers under a wide head, likewise."""


def llama_in(folder: Path, **sizes: int) -> str:
    """A folder, with the configuration of a Llama in it."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaConfig(**(small | sizes), architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def live(model: str = TWO_LAYERS, batch_size: int = 2, seq_len: int = 16) -> Step:
    """A model and its batch, which nothing describes."""
    made = build(WorkloadSpec(model=model, batch_size=batch_size, seq_len=seq_len))
    return Step(made.model, made.batch, optimizer=made.optimizer)


def fewer_alternatives(patch: pytest.MonkeyPatch) -> None:
    """Smaller batches, chunks and shorter sequences alone where nothing fits: each change is a ghost run of its own."""
    for family in ("lean_optimizers", "with_adapters", "sharded"):
        patch.setattr(f"autockpt.tuning.infeasible._{family}", lambda change: iter(()))


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def of_rows(loss: Callable[[torch.Tensor], torch.Tensor], *, normed: bool = False, **more: torch.Tensor) -> Step:
    """A live step on four rows, of three blocks, ``normed`` by their batch; ``more`` is in that besides."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if normed else nn.ReLU()) for _ in range(3))
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(*blocks)))
    batch = {"x": torch.zeros(4, 8)} | more
    return Step(model, batch, loss=lambda model, batch: loss(model(batch["x"])))
