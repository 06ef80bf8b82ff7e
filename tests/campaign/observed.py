"""Running a program, and what it leaves behind step by step: bytes that can be compared."""

import collections
import functools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_OF_MODULES = frozenset(torch.nn.Module().__dict__) - {"training"} | {"forward"}


def run(text: str, attach: Callable[[Any], Any] | None, seen: list[tuple[str, bytes]]) -> None:
    """Train as the program says, with a plan attached by ``attach``; what is seen goes into ``seen`` as it comes."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    names = loaded(text)
    model = names["build"]()
    if attach is not None:
        attach(model)
    for step in range(names["STEPS"]):
        names["STEP"] = step
        out = names["train"](model, names["batch"](step))
        for loss in out if isinstance(out, list) else [out]:
            if loss is not None:
                seen.append((f"step {step}: result", data(loss)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is not None:
                    seen.append((f"step {step}: gradient {name}", data(p.grad)))
                    p -= 0.05 * p.grad
                    p.grad = None
        for kept in names["KEPT"]:
            seen.append((f"step {step}: gradient of logits", b"none" if kept.grad is None else data(kept.grad)))
        names["KEPT"].clear()
    for kind, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        seen += [(f"{kind} {name}", data(t)) for name, t in found]
    for name, module in model.named_modules():
        fields = {k: v for k, v in vars(module).items() if k not in _OF_MODULES}
        seen += [(f"state {name}.{k}", state(v).encode()) for k, v in fields.items()]
    drawn = repr((random.getstate(), np.random.get_state())).encode()
    seen.append(("random state", data(torch.get_rng_state()) + drawn))


def loaded(text: str) -> dict[str, Any]:
    """The program's names."""
    sys.modules["program"] = program = types.ModuleType("program")  # where dataclasses look for their module
    exec(_compiled(text), vars(program))
    return vars(program)


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> Any:
    return compile(text, "<program>", "exec")


def data(tensor: torch.Tensor) -> bytes:
    """A tensor's type and bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()


def state(value: Any) -> str:
    """The content of what is promised of attributes: tensors, numbers, and containers of them; empty for all else."""
    if isinstance(value, torch.Tensor):
        return data(value).hex()
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{state(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple | set | collections.deque):
        return "[" + ",".join(map(state, value)) + "]"
    return repr(value) if value is None or isinstance(value, int | float | str | bytes) else ""
