"""Host time per layer and step of every choice, beside PyTorch's checkpointing called by hand.

    OMP_NUM_THREADS=1 python -m tests.evidence.host_cost [--marks] [DEVICE [ROUNDS [CHOICE ...]]]

A Llama of 24 layers so small that next to nothing but host time is left (hidden 16, 8 tokens). All candidates in turns,
each after four steps that are not timed (calls 1, 2 and 4 are checked); medians over the rounds, and
the 95 % interval of the ratio to checkpointing by hand. Time is that of the processor in this process, so that other
work on the machine counts little; where there is much of it (the load is said), caches and shared cores still show. So
beside the times stand counts, which are the same on every run: Python functions called per layer, of those the ones
by which torch asks a mode about an op or a function, and objects that Python's garbage collector has to look through
until backward. On a GPU its work is waited for after every step, outside of what is timed. Where torch_remat is
installed, one row is its checkpoint with the output of one module kept.

Times depend on the machine and on what runs beside; instructions do not. With ``--marks`` each candidate runs once
between calls of ``getloadavg``, before which callgrind can begin a new count (``--dump-before=getloadavg``).
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.checkpoint import checkpoint

from autockpt.measuring.statistics import noise, ratio_interval
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, choice_kinds, parse_choice
from tests.evidence.bench.peers.by_remat import checkpointed, kept
from tests.evidence.tables import head, row
from tests.policies.heads import small_llama
from tests.policies.zoo import objects_alive_after

LAYERS, ROUNDS, WARMUP, BY_HAND = 24, 40, 4, "torch.utils.checkpoint by hand"
REMAT, KEPT = "torch_remat, keep mlp.up_proj", "mlp.up_proj"
HAS_REMAT = find_spec("torch_remat") is not None
HEADS = (
    *("choice on every layer", "forward, µs a layer", "times plain", "backward, µs a layer", "step, times by hand"),
    *("Python calls, forward", "backward", "ops asked about", "functions asked about", "objects kept"),
)
CHOICES: list[Any] = [
    *(k for k in choice_kinds("block") if k != "compile_budget"),  # which saves everything outside compiled code
    {"kind": "selective", "keep": ["mlp.up_proj"]},
    {"kind": "selective", "keep": ["fused_attention", "mlp.gate_proj", "mlp.up_proj"]},
]


def model_and_batch(device: str = "cpu") -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The tiny model."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    model = small_llama(use_cache=False, **sizes)().train()
    ids = torch.randint(0, 64, (1, 8)).to(device)
    return model.to(device), {"input_ids": ids, "labels": ids}


@contextmanager
def by_hand(model: torch.nn.Module) -> Iterator[None]:
    """transformers' own slot, set to non-reentrant checkpointing on every layer."""
    layers = model.model.layers  # type: ignore[union-attr]
    for layer in layers:  # type: ignore[union-attr]
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:  # type: ignore[union-attr]
            layer.gradient_checkpointing = False


@contextmanager
def by_remat(model: torch.nn.Module) -> Iterator[None]:
    """torch_remat around every layer, with the output of one module kept (``pip install torch_remat``)."""
    with ExitStack() as stack:
        for name, layer in model.model.layers.named_children():  # type: ignore[union-attr]
            part = layer.get_submodule(KEPT)
            for module, around in ((part, partial(kept, KEPT)), (layer, partial(checkpointed, name))):
                stack.enter_context(patch.object(module, "forward", partial(around, module.forward)))
        yield


def attached(model: torch.nn.Module, name: str, choice: Choice | None) -> AbstractContextManager[object]:
    """One candidate on every layer."""
    if name in PEERS:
        return PEERS[name](model)
    return attach(model, {} if choice is None else {f"model.layers.{i}": choice for i in range(LAYERS)})


PEERS = {BY_HAND: by_hand} | ({REMAT: by_remat} if HAS_REMAT else {})
Rows = dict[str, dict[str, float | str]]


def _candidates() -> dict[str, Choice | None]:
    return {"nothing attached": None} | dict.fromkeys(PEERS) | {str(c): c for c in map(parse_choice, CHOICES)}


def measure(device: str = "cpu", rounds: int = ROUNDS, keep: Callable[[Rows], object] | None = None) -> Rows:
    """Medians by candidate: µs a layer of forward and backward, their sum's noise, and the ratio to checkpointing by
    hand in words. ``keep`` is given what is known after every round but the first."""
    torch.set_num_threads(1)
    model, batch = model_and_batch(device)

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

    candidates = _candidates()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for turn in range(rounds):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            with attached(model, name, candidates[name]):
                for _ in range(WARMUP):
                    once()
                times[name].append(once())
        if keep is not None and turn:
            keep(_rows(times))
    return _rows(times)


def _rows(times: Mapping[str, list[tuple[float, float]]]) -> Rows:
    hand = [sum(pair) for pair in times[BY_HAND]]
    found: Rows = {}
    for name, pairs in times.items():
        forward, backward = (statistics.median(p[i] for p in pairs) / LAYERS * 1e6 for i in (0, 1))
        ratio = str(ratio_interval([sum(p) for p in pairs], hand)) if name != BY_HAND else ""
        both = noise([sum(p) for p in pairs])
        found[name] = {"forward": forward, "backward": backward, "noise": both, "by hand": ratio}
    return found


def counts(device: str = "cpu") -> dict[str, tuple[float, ...]]:
    """By candidate and layer: Python functions called in forward and in backward, of all of them those that a mode is
    asked by: about ops (``__torch_dispatch__``) and about functions (``__torch_function__``); and objects that live
    from forward to backward."""
    model, batch = model_and_batch(device)
    found: dict[str, tuple[float, ...]] = {}
    for name, choice in _candidates().items():
        with attached(model, name, choice):
            objects = objects_alive_after(lambda: model(**batch).loss)
            called: Counter[str] = Counter()

            def note(frame: FrameType, event: str, _: object, called: Counter[str] = called) -> None:
                if event == "call":
                    called[frame.f_code.co_name] += 1

            sys.setprofile(note)
            loss = model(**batch).loss
            before = called.total()
            loss.backward()
            sys.setprofile(None)
            seen = (called["__torch_dispatch__"], called["__torch_function__"])
            found[name] = tuple(n / LAYERS for n in (before, called.total() - before, *seen, objects))
            model.zero_grad()
    return found


def mark(device: str = "cpu") -> None:
    """A forward and a backward of each candidate, with a mark before, between and after them."""
    model, batch = model_and_batch(device)
    gc.disable()
    for name, choice in _candidates().items():
        with attached(model, name, choice):
            for _ in range(WARMUP):
                model(**batch).loss.backward()
            os.getloadavg()
            loss = model(**batch).loss
            os.getloadavg()
            loss.backward()
            os.getloadavg()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.host_cost")
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    parser.add_argument("choices", nargs="*", default=CHOICES)
    parser.add_argument("--marks", action="store_true")
    asked = parser.parse_args()
    rounds, CHOICES[:] = asked.rounds, asked.choices
    if asked.marks:
        return mark(asked.device)
    counted = counts(asked.device)
    times = measure(asked.device, rounds)
    plain = times["nothing attached"]["forward"]
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    print(f"Load of the machine over 1, 5 and 15 minutes: {load} on {os.cpu_count()} cores; {rounds} rounds.\n")
    print(head(HEADS))
    for name, known in times.items():
        forward, backward = float(known["forward"]), float(known["backward"])
        cells = [name, f"{forward:.0f}", f"{forward / float(plain):.2f}", f"{backward:.0f}", known["by hand"]]
        print(row([*cells, *(f"{count:.0f}" for count in counted[name])]))


if __name__ == "__main__":
    main()
