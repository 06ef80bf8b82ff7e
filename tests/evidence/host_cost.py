"""Host time per layer and step of every choice, beside PyTorch's checkpointing called by hand.

    OMP_NUM_THREADS=1 python -m tests.evidence.host_cost [DEVICE]

A Llama of 24 layers so small that next to nothing but host time is left (hidden 16, 8 tokens). All candidates in turns,
each after steps that are not timed (a choice gets to know its layer in the first two); medians over the rounds, and
the 95 % interval of the ratio to checkpointing by hand. Time is that of the processor in this process, so that other
work on the machine counts little. On a GPU its work is waited for after every step, outside of what is timed.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch.utils.checkpoint import checkpoint

from autockpt.history.statistics import noise, ratio_interval
from autockpt.runtime import attach
from autockpt.schema import choice_kinds
from autockpt.schema.choices import from_label, label

LAYERS, ROUNDS, WARMUP, BY_HAND = 24, 40, 3, "torch.utils.checkpoint by hand"
CHOICES = [
    *choice_kinds("block"),
    '{"kind": "selective", "keep": ["mlp.up_proj"]}',
    '{"kind": "selective", "keep": ["fused_attention", "mlp.gate_proj", "mlp.up_proj"]}',
]


def model_and_batch(device: str = "cpu") -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The tiny model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    ids = torch.randint(0, 64, (1, 8)).to(device)
    return transformers.LlamaForCausalLM(config).train().to(device), {"input_ids": ids, "labels": ids}


@contextmanager
def by_hand(model: torch.nn.Module) -> Iterator[None]:
    """transformers' own slot, set to non-reentrant checkpointing on every layer."""
    layers = model.model.layers  # type: ignore[union-attr]
    for layer in layers:  # type: ignore[union-attr]
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:  # type: ignore[union-attr]
            layer.gradient_checkpointing = False


def measure(device: str = "cpu", rounds: int = ROUNDS) -> dict[str, dict[str, float | str]]:
    """Medians by candidate: µs a layer of forward and backward, their sum's noise, and the ratio to checkpointing by
    hand in words."""
    torch.set_num_threads(1)
    model, batch = model_and_batch(device)
    names = [f"model.layers.{i}" for i in range(LAYERS)]

    def once() -> tuple[float, float]:
        begin = time.process_time()
        loss = model(**batch).loss
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        if device != "cpu":
            torch.cuda.synchronize()
        model.zero_grad()
        return middle - begin, end - middle

    parsed = {label(c): c for c in map(from_label, CHOICES)}
    candidates = {"nothing attached": None, BY_HAND: None} | parsed
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for turn in range(rounds):
        order = list(candidates) if turn % 2 == 0 else list(reversed(candidates))
        for name in order:
            choice = candidates[name]
            choices = {} if choice is None else dict.fromkeys(names, choice)
            with by_hand(model) if name == BY_HAND else attach(model, choices):
                for _ in range(WARMUP):
                    once()
                times[name].append(once())
    hand = [sum(pair) for pair in times[BY_HAND]]
    found: dict[str, dict[str, float | str]] = {}
    for name, pairs in times.items():
        forward, backward = (statistics.median(p[i] for p in pairs) / LAYERS * 1e6 for i in (0, 1))
        ratio = str(ratio_interval([sum(p) for p in pairs], hand, robust=True)) if name != BY_HAND else ""
        both = noise([sum(p) for p in pairs])
        found[name] = {"forward": forward, "backward": backward, "noise": both, "by hand": ratio}
    return found


def main() -> None:
    """Measure and print the table."""
    print("| choice on every layer | forward, µs a layer | backward, µs a layer | times by hand |")
    print("|---|---|---|---|")
    for name, row in measure(*sys.argv[1:2]).items():
        print(f"| {name} | {row['forward']:.0f} | {row['backward']:.0f} | {row['by hand']} |")


if __name__ == "__main__":
    main()
