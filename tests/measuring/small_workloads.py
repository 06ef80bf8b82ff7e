"""Small workloads to measure, and all that their steps can change."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autockpt.schema import RECOMPUTE, Choice, Silence
from autockpt.workload import Step

BLOCKS, WIDTH, ROWS = 4, 16, 256


class Steps(Silence):
    """Counts the steps of stages."""

    def __init__(self) -> None:
        self.count = 0

    def advance(self, steps: int = 1) -> None:
        self.count += steps


class Block(nn.Module):
    """Two matmuls with dropout and batch statistics between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    """Blocks named layers.0, layers.1, ..., and what a test wants done in forward."""

    def __init__(self, dropout: float = 0.1, *, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(dropout) for _ in range(BLOCKS)])
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.before: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.before()
        return self.norm(x)


RECOMPUTE_ALL: dict[str, Choice] = {f"layers.{i}": RECOMPUTE for i in range(BLOCKS)}


def make_workload(model: Stack | None = None, **settings: Any) -> Step:
    """A workload on the CPU with AdamW, unless told otherwise."""
    torch.manual_seed(0)
    model = model or Stack()
    settings.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.1))
    batch = torch.randn(ROWS, WIDTH)
    return Step(model, batch, loss=lambda m, x: m(x).square().mean(), **settings)


def bits(workload: Step) -> dict[str, Any]:
    """Everything that a step can change, with the identities of the tensors."""
    model, optimizer, scaler = workload.model, workload.optimizer, workload.scaler
    tensors = {f"parameter {n}": p for n, p in model.named_parameters()}
    tensors |= {f"buffer {n}": b for n, b in model.named_buffers()}
    tensors |= {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    states = {} if optimizer is None else optimizer.state
    for number, state in enumerate(states.values()):
        tensors |= {f"state {number} {name}": t for name, t in state.items() if isinstance(t, torch.Tensor)}
    if isinstance(workload.batch, torch.Tensor):
        tensors["batch"] = workload.batch
    return {
        "tensors": {n: (id(t), t.detach().clone()) for n, t in tensors.items()},
        "groups": copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        if optimizer
        else None,
        "scaler": None if scaler is None else copy.deepcopy(vars(scaler)),
        "modes": {n: m.training for n, m in model.named_modules()},
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),  # type: ignore[index]
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or a is b


def train(workload: Step, cycles: int = 2) -> None:
    """As a user would, with real learning rates; ends with gradients, as after a last backward."""
    for _ in range(cycles):
        workload.cycle()
    workload.forward_backward()


# A file of a user's, with functions that make workloads.
FACTORY = """
import os, signal, sys, time, types
from collections import OrderedDict
import torch
from torch import nn

print("factory imported")

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(16, 16)
    def forward(self, x):
        return self.line(x).exp().tanh()

def net():
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*(Layer() for _ in range(3)))))

def make():
    return net(), torch.randn(16384, 16), lambda model, batch: model(batch).mean()

def broken():
    width = 3
    raise ValueError(f"width {width} is odd")

def failing_step():
    def step(model, batch):
        return model(batch)[999]
    return net(), torch.randn(64, 16), step

def too_large():
    return net(), torch.randn(64, 16), lambda model, batch: torch.empty(1 << 46) + model(batch)

# Functions that a test can call in the worker: only modules of autockpt may be named.
probe = types.ModuleType("autockpt.probe")
probe.pid = lambda runner, payload: {"pid": os.getpid(), "payload": payload, "kind": runner.device.kind}
probe.kill = lambda runner, payload: os.kill(os.getpid(), signal.SIGKILL)
probe.sleep = lambda runner, payload: time.sleep(payload["seconds"]) or {}
probe.interrupt = lambda runner, payload: os.kill(os.getpid(), signal.SIGINT) or {}
probe.wrong = lambda runner, payload: {}["missing"]
def leave(runner, payload):
    print("about to leave", flush=True)
    os._exit(3)
probe.leave = leave
sys.modules["autockpt.probe"] = probe
"""
