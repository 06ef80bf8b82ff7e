"""What a forward runs under is there when it runs again, and what it begins by hand is over afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autockpt.schema.choices import Segment
from tests.policies.zoo import assert_as_plain, on

D = 16


class Begins(nn.Module):
    """What it begins by hand it ends by hand, after all that backward needs is there; ``late``: from then on alone."""

    def __init__(self, begin: Callable[[Begins], Callable[[], object]], late: int) -> None:
        super().__init__()
        self.a, self.b, self.begin, self.late, self.calls = nn.Linear(D, D), nn.Linear(D, D), begin, late, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        end = self.begin(self) if self.calls > self.late else int
        result = x + self.b(torch.tanh(self.a(x))).float()
        end()
        return result


def _autocast(unit: Begins) -> Callable[[], object]:
    block = torch.autocast("cpu", torch.bfloat16)
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def _autocast_flag(unit: Begins) -> Callable[[], None]:
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)

    def end() -> None:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
        torch.clear_autocast_cache()

    return end


def _default_device(unit: Begins) -> Callable[[], None]:
    assert torch.empty(0).device.type == "cpu"
    torch.set_default_device("meta")
    return lambda: torch.set_default_device(None)


class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.tanh else result


def _mode(unit: Begins) -> Callable[[], None]:
    mode = Doubles()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def _around_all() -> tuple[object, ...]:
    depth, modes = torch.autocast_increment_nesting(), torch._C._len_torch_function_stack()
    torch.autocast_decrement_nesting()
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return depth, modes, casts, torch.get_default_dtype(), torch.is_grad_enabled()


def _as_plain(
    make: Callable[[], nn.Module], kind: Any, steps: int, around: Any = nullcontext, units: str = "01"
) -> None:
    """Training is bit-equal, and nothing that was begun is left after a step."""
    before = _around_all()

    def unchanged(*_: Any) -> None:
        assert _around_all() == before

    assert_as_plain(make, on(units, kind), lambda: torch.randn(8, D), steps, before=unchanged, around=around)
    unchanged()


@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("kind", ["recompute", Segment(size=2)], ids=str)
@pytest.mark.parametrize("begin", [_autocast, _autocast_flag, _default_device, _mode])
def test_what_a_forward_begins_by_hand_ends_with_its_rerun(begin, kind, late) -> None:
    try:
        _as_plain(lambda: nn.Sequential(Begins(begin, late), Begins(begin, late)), kind, late + 4)
    finally:
        torch.set_default_device(None)


@contextmanager
def _dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def _device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


class Makes(nn.Linear):
    """Takes its scale from the defaults of new tensors, and from the kernels that are allowed."""

    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.linspace(0, 1, D)
        scale = torch.linspace(0, 1, D, dtype=made.dtype, device="cpu") + made.is_meta
        q = super().forward(x).exp().view(1, 2, -1, D)
        attended = nn.functional.scaled_dot_product_attention(q, q, q).view(-1, D)
        return (attended * scale * (1 + torch.backends.cuda.flash_sdp_enabled())).tanh().float()


@pytest.mark.parametrize("kind", ["recompute", "selective", "remake", Segment(size=2)], ids=str)
@pytest.mark.parametrize(
    "around", [_dtype, _device, lambda: torch.device("meta"), lambda: sdpa_kernel(SDPBackend.MATH)]
)
def test_what_is_in_force_around_the_forward_alone(around, kind) -> None:
    _as_plain(lambda: nn.Sequential(Makes(), Makes()), kind, 6, around)


def test_a_block_that_one_unit_enters_and_another_leaves() -> None:
    block = torch.autocast("cpu", torch.bfloat16)

    class Enters(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            block.__enter__()
            return super().forward(x)

    class Leaves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            block.__exit__(None, None, None)
            return x

    _as_plain(lambda: nn.Sequential(Enters(D, D), nn.Tanh(), Leaves(D, D)), "recompute", 4, units="02")


_FIRST_OF_A_PROCESS = """
import torch, transformers
from autockpt.runtime import attach
from tests.policies.zoo import on
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
ids = torch.randint(0, 64, (2, 128), device="cuda")
with attach(model, on(["model.layers.0", "model.layers.1"], "recompute")):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
assert all(map(torch.equal, found, (p.grad for p in model.parameters())))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_whose_first_attention_is_in_a_planned_unit() -> None:
    subprocess.run([sys.executable, "-c", _FIRST_OF_A_PROCESS], check=True)
