"""Some training steps and all that they leave behind, for comparison bit by bit; nothing of autockpt's own is used."""

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.evidence.sweep.batches import loss_of

STEPS = 5
"""Two in which a choice gets to know its units, and three as in mid-training."""
Record = dict[str, bytes]
Attach = Callable[[nn.Module], AbstractContextManager[object]]


def train(model: nn.Module, batch: dict[str, Any], attach: Attach, *, deterministic: bool = False) -> Record:
    """Losses, gradients, buffers and random states of some steps of a copy of ``model``, as bytes, by name."""
    model, batch = copy.deepcopy(model), copy.deepcopy(batch)
    seed_all()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: Record = {}
    with ExitStack() as stack:
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            stack.callback(torch.use_deterministic_algorithms, False)
        stack.enter_context(attach(model))
        for i in range(1, STEPS + 1):
            loss = loss_of(model, batch)
            seen[f"step {i}: loss"] = _bytes(loss)
            seen[f"step {i}: random states after forward"] = _random_states()
            loss.backward()
            seen[f"step {i}: random states after backward"] = _random_states()
            seen |= {
                f"step {i}: gradient {n}": _bytes(p.grad) for n, p in model.named_parameters() if p.grad is not None
            }
            seen |= {f"step {i}: buffer {n}": _bytes(b) for n, b in model.named_buffers()}
            optimizer.step()
            optimizer.zero_grad()
    seen["weights after all"] = b"".join(_bytes(p) for p in model.parameters())
    return seen


def differences(first: Record, second: Record) -> list[str]:
    """Names of what is not bit-equal, or there in one of the two only."""
    return [name for name in dict.fromkeys((*first, *second)) if first.get(name) != second.get(name)]


def health(record: Record) -> str:
    """What makes a comparison worth less: a loss that is no number, hardly any gradients; empty if all is well."""
    loss = numpy.frombuffer(record["step 1: loss"], dtype=numpy.uint8)
    value = torch.from_numpy(loss.copy()).view(torch.float32)
    gradients = [data for name, data in record.items() if "step 1: gradient" in name]
    if not torch.isfinite(value).all():
        return "loss is not finite"
    moving = sum(any(data) for data in gradients)
    return "" if moving > 1 else "hardly any gradient differs from zero"


def seed_all() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def _random_states() -> bytes:
    return b"".join(
        (_bytes(torch.get_rng_state()), repr(random.getstate()).encode(), repr(numpy.random.get_state()).encode())
    )


def _bytes(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
