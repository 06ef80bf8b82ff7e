"""Running a program, and what it leaves behind step by step: bytes that can be compared."""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_CODE = torch.utils.hooks.RemovableHandle, types.FunctionType, types.MethodType, types.BuiltinFunctionType, type
_CODE = *_CODE, types.ModuleType
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
    own = [(k, v) for k, v in names.items() if k.rpartition("_")[2].isdigit()]
    seen += [(f"global {k}", state(v).encode()) for k, v in own if not callable(v) or isinstance(v, torch.nn.Module)]
    drawn = repr(random.getstate()).encode() + state(np.random.get_state()).encode()
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


def state(value: Any, depth: int = 6) -> str:
    """Any object's content, as far as it can be read without changing it."""
    if depth == 0:
        return "…"
    if isinstance(value, torch.Tensor):
        return data(value).hex()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return state(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, torch.Generator):
        return data(value.get_state()).hex()
    if isinstance(value, dict | collections.UserDict):
        names = (k if isinstance(k, str | int | tuple) else type(k).__name__ for k in value)
        pairs = zip(names, value.values(), strict=True)
        return "{" + ",".join(f"{name}:{state(v, depth - 1)}" for name, v in pairs) + "}"
    if isinstance(value, list | tuple | collections.deque | collections.UserList):
        return "[" + ",".join(state(v, depth - 1) for v in value) + "]"
    if isinstance(value, torch.nn.Module):
        tensors = {**dict(value.named_buffers()), **dict(value.named_parameters())}
        fields = {k: v for k, v in vars(value).items() if k not in _OF_MODULES and "layers" not in value._modules}
        return state(tensors, depth - 1) + state(fields, depth - 1)
    if isinstance(value, _CODE):
        return ""
    if hasattr(value, "__dict__"):
        return state(vars(value), depth - 1)
    if value is None or isinstance(value, int | float | str | bytes | bytearray | set | frozenset):
        return repr(value)
    return ""
