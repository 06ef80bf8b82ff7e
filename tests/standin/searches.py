"""Searches on the stand-in, their trials measured there, and each plan once more under its budget as a real limit.

python -m tests.standin.searches [NAME …]     # builds the device, and runs in a process that has it

A plan gives back memory a layer at a time, and the allocator takes it from the device 2 MiB at a time where no piece
is larger than 1 MiB, or else 20 MiB. So how full a budget can be made depends on the job: with twelve layers of 8 MiB
each, 92.7 % of 82 MiB were what a plan could take. These jobs are deep and narrow, and each row says what a layer is.

Copies cost next to nothing here, so what fills a budget may be no faster than everything offloaded. Therefore only one
search of each model may offload.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    ViTConfig,
    ViTForImageClassification,
)

from autockpt.devices import get_device
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring import StepRunner
from autockpt.schema import label
from autockpt.shipped import load_space
from autockpt.tuning import run_search, search_request
from autockpt.workload import Step
from tests.standin import build

LAYERS, ROWS, LENGTH, VOCABULARY, WIDTH = 24, 8, 128, 128, 64
FILLED = 0.97
MIB = 2**20
Job = tuple[nn.Module, dict[str, Tensor]]


class Convolutional(nn.Module):
    """A classifier of residual blocks as in a ResNet, without that network's pooling between them."""

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.norm = nn.GroupNorm(4, channels)
            self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(torch.relu(self.norm(self.first(x))))

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(self.Block(channels) for _ in range(layers))
        self.head = nn.Linear(channels, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _configured(kind: type[PreTrainedConfig], **more: object) -> PreTrainedConfig:
    """Without dropout in attention, which then is fused: with it scores would be the largest piece."""
    sizes = dict(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4)
    return kind(**sizes, attention_dropout=0.0, **more)


def _tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH))


def _llama() -> Job:
    config = _configured(LlamaConfig, vocab_size=VOCABULARY, use_cache=False)
    return LlamaForCausalLM(config), {"input_ids": (tokens := _tokens()), "labels": tokens}


def _gpt2() -> Job:
    more = dict(vocab_size=VOCABULARY, n_positions=LENGTH, attn_pdrop=0.0, use_cache=False)
    config = GPT2Config(n_embd=WIDTH, n_inner=2 * WIDTH, n_layer=LAYERS, n_head=4, **more)
    return GPT2LMHeadModel(config), {"input_ids": (tokens := _tokens()), "labels": tokens}


def _bert() -> Job:
    config = _configured(BertConfig, vocab_size=VOCABULARY, attention_probs_dropout_prob=0.0)
    labels = torch.randint(0, 2, (ROWS,))
    return BertForSequenceClassification(config), {"input_ids": _tokens(), "labels": labels}


def _vit() -> Job:
    """144 patches of an image, and the class token."""
    config = _configured(ViTConfig, image_size=96, patch_size=8, num_labels=10)
    pixels = torch.randn(ROWS, 3, 96, 96)
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.randint(0, 10, (ROWS,))}


def _resnet() -> Job:
    pixels = torch.randn(ROWS, 3, 64, 64)
    return Convolutional(LAYERS, 8), {"pixel_values": pixels, "labels": torch.randint(0, 10, (ROWS,))}


MODELS: dict[str, Callable[[], Job]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "resnet": _resnet,
}
RECOMPUTED, OFFLOADED = ("save", "recompute"), ("save", "recompute", "offload")
BUDGETS = {f"{share}%act": RECOMPUTED for share in (90, 75, 60, 45)} | {"60%act, offload too": OFFLOADED}
SEARCHES = {f"{model} {budget}": (model, choices) for budget, choices in BUDGETS.items() for model in MODELS}


def step_of(model: str) -> Step:
    """A training step of one of the models."""
    torch.manual_seed(0)
    built, batch = MODELS[model]()
    built, batch = built.to("standin"), {name: tensor.to("standin") for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(built.parameters())
    if model != "resnet":
        return Step(built, batch, optimizer=optimizer)
    labels = batch.pop("labels")
    return Step(built, batch, loss=lambda m, b: nn.functional.cross_entropy(m(**b), labels), optimizer=optimizer)


def searched(name: str, trials: int = 2) -> tuple[str, str]:
    """What one search made of its budget, as a row of the table, and what is wrong with it, if anything.

    Raises DeviceOutOfMemory where the plan exceeds its budget as a real limit.
    """
    model, allowed = SEARCHES[name]
    step, device = step_of(model), get_device("standin")
    space = load_space("knobs").restricted(allowed)
    outcome = run_search(
        search_request(step=step, budget=name.split()[1].rstrip(","), trials=trials, space=space, again=True)
    )
    assert outcome.plan is not None
    budget, ours = outcome.budget.bytes, outcome.rows[-1]
    choices = outcome.plan.expand_planned()
    peak = StepRunner(step, device).measure(choices, steps=1, budget_bytes=budget).peak_bytes
    peaks = {row.name: row.measured.peak_bytes for row in outcome.rows if row.measured is not None}
    layer = (peaks["none"] - peaks["recompute all"]) / len(choices)
    same = [row.name for row in outcome.rows[:-1] if row.plan_hash == ours.plan_hash]
    plan = same[0] if same else ", ".join(f"{n} {kind}" for kind, n in Counter(map(label, choices.values())).items())
    wrong = "over" if peak > budget else "less" if peak < FILLED * budget and outcome.binding else ""
    predicted = "" if ours.predicted is None else f"{ours.predicted.peak_bytes / MIB:.0f}"
    cells = [name, plan, f"{budget / MIB:.1f}", predicted, f"{peak / MIB:.0f}", f"{peak / budget:.1%}"]
    return f"| {' | '.join([*cells, f'{layer / MIB:.1f}', wrong])} |", wrong


def main(names: list[str]) -> int:
    """A row for each search. 1 where a budget was exceeded, or one that binds was filled to less than 97 %."""
    if not os.environ.get("STANDIN_SCHEDULE"):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.standin.searches", *names],
            build.environment("copies-late"),
        )
    print("| search | plan | budget, MiB | predicted | measured | filled | a layer, MiB | |")
    print("|---|---|--:|--:|--:|--:|--:|---|", flush=True)
    missed = 0
    for name in names or SEARCHES:
        began = time.process_time()
        try:
            row, wrong = searched(name)
        except DeviceOutOfMemory as error:
            row, wrong = f"| {name} | | | | | | | over: {error.message} |", "over"
        missed += bool(wrong)
        print(row, flush=True)
        print(f"{name}: {time.process_time() - began:.0f} s of processor time", file=sys.stderr, flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
