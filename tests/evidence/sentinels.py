"""The sentinels' own time, as a share of a training step at the default sampling.

    OMP_NUM_THREADS=1 python -m tests.evidence.sentinels > results/sentinels_cpu_202611/own_time.md

Steps (forward and backward) with no sentinel, and with one over every call of every unit, in turns. Their difference is
what checking all units takes; at the default that is spread over ``window`` steps, in which every unit is checked once.
What is left, looking at a few tensors of each other call at one place, is timed alone. Time is that of this thread's
processor, so that other work on the machine counts little; medians over the rounds, and the 95 % interval of the ratio
of the two steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import transformers
from torch import nn

import autockpt
from autockpt.history.statistics import ratio_interval
from autockpt.policies.rerun_state.code import Code
from autockpt.policies.sentinels import Sentinels
from autockpt.policies.spots import IN_TURN, Places

CHOICES = ("recompute", "selective", "remake", "offload", "recompute_offload", {"kind": "segment", "size": 2})
SHAPES = {  # hidden size, layers, batch, tokens
    "so small that only host time is left": (16, 24, 1, 8),
    "a small Llama": (256, 4, 4, 256),
}


def model_and_batch(hidden: int, layers: int, batch: int, tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    ids = torch.randint(0, 64, (batch, tokens))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def in_turns(shape: tuple[int, int, int, int], choice: Any, rounds: int) -> tuple[list[float], list[float], Any]:
    """Seconds of steps without and with sentinels over every call, and what these have checked."""
    model, batch = model_and_batch(*shape)
    plan = autockpt.Plan(choices={"model.layers.*": choice})
    times: dict[str, list[float]] = {"off": [], "all": []}
    for _ in range(rounds):
        for mode, found in times.items():
            with autockpt.apply(model, plan, sentinels=mode) as handle:
                for i in range(5):  # a choice gets to know its layer in the first two
                    begin = time.thread_time()
                    model(**batch).loss.backward()
                    if i > 2:
                        found.append(time.thread_time() - begin)
                model.zero_grad()
                proof = handle.sentinels
    return times["off"], times["all"], proof


def spotting(saved: int, calls: int = 20_000) -> float:
    """Seconds that a call takes which is not due, and of whose ``saved`` tensors a few are looked at at one place."""
    sentinels = Sentinels("sample")
    unit = sentinels.unit("a unit")
    assert unit is not None
    sentinels.in_mid_training()
    unit._due, unit.places = 2 * calls, Places(saved, range(saved))
    module, code, x = nn.Identity(), Code(False, False), torch.randn(8, 64, requires_grad=True)
    total = 0.0
    for _ in range(calls):
        begin = time.thread_time()
        watch = unit.watch(module, code=code)
        packing = unit.packing(watch)
        total += time.thread_time() - begin
        assert watch is None and packing is not None
        tensor = x * 2.0  # what a unit makes, whose forward has begun
        begin = time.thread_time()
        for _ in range(saved):
            if (entry := packing(tensor)) is not None:
                entry.handed(tensor)
        total += time.thread_time() - begin
    assert unit.spots >= calls * IN_TURN
    return total / calls


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch.set_num_threads(1)
    print("| model | choice | step | with every call checked | and at a few places | of a step at the default |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for words, shape in SHAPES.items():
        for choice in CHOICES:
            off, every, proof = in_turns(shape, choice, rounds)
            ratio, step = ratio_interval(every, off), statistics.median(off)
            saved = proof.tensors // proof.checks if proof.checks and choice != "offload" else 0
            spots = spotting(saved) * len(proof.units) / step if saved else 0.0
            share, most = ((r - 1) / proof.window + spots for r in (ratio.value, ratio.high))
            worst = max(worst, most)
            name = choice if isinstance(choice, str) else choice["kind"]
            print(
                f"| {words} | {name} | {step * 1e3:.1f} ms | {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] × | "
                f"{spots:.2%} | {share:.2%} (at most {most:.2%}) |",
                flush=True,
            )
    print(f"\nThe most of all, at the upper end of its interval: {worst:.2%} of a step.")


if __name__ == "__main__":
    main()
