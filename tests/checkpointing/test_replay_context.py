"""What a forward runs under is there when it runs again, and what it begins by hand is over afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autockpt.runtime import attach
from autockpt.schema.choices import Segment, parse_choice

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


@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("kind", ["recompute", "segment"])
@pytest.mark.parametrize("begin", [_autocast, _autocast_flag, _default_device, _mode])
def test_what_a_forward_begins_by_hand_ends_with_its_rerun(begin, kind, late) -> None:
    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found, before = nn.Sequential(Begins(begin, late), Begins(begin, late)), [], _around_all()
        choice = Segment(size=2) if kind == "segment" else parse_choice(kind)
        session = attach(model, {"0": choice, "1": choice}) if planned else nullcontext()
        with session:
            for _ in range(late + 4):
                model.zero_grad()
                loss = model(torch.randn(8, D)).square().mean()
                loss.backward()
                assert _around_all() == before
                found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return found

    try:
        assert all(map(torch.equal, trained(True), trained(False)))
    finally:
        torch.set_default_device(None)


def _dtype_around(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return forward()
    finally:
        torch.set_default_dtype(torch.float32)


def _block_around(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.device("meta"):
        return forward()


def _device_around(forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.set_default_device("meta")
    try:
        return forward()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", ["recompute", "selective", "remake", "segment"])
@pytest.mark.parametrize("around", [_dtype_around, _block_around, _device_around])
def test_defaults_of_new_tensors_that_are_in_force_around_the_forward_alone(around, kind) -> None:
    class Makes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.linspace(0, 1, D)
            on_meta = made.is_meta
            scale = torch.linspace(0, 1, D, dtype=made.dtype, device="cpu") + on_meta
            return (super().forward(x).exp() * scale).tanh().float()

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found, before = nn.Sequential(Makes(D, D), Makes(D, D)), [], _around_all()
        choice = Segment(size=2) if kind == "segment" else parse_choice(kind)
        with attach(model, {"0": choice, "1": choice}) if planned else nullcontext():
            for _ in range(6):
                model.zero_grad()
                x = torch.randn(8, D)
                loss = around(lambda x=x: model(x).square().mean())
                loss.backward()
                assert _around_all() == before
                found += [p.grad.clone() for p in model.parameters()]
        return found

    assert all(map(torch.equal, trained(True), trained(False)))


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

    def trained(choices) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found, before = nn.Sequential(Enters(D, D), nn.Tanh(), Leaves(D, D)), [], _around_all()
        with attach(model, choices):
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(8, D)).float().square().mean().backward()
                assert _around_all() == before
                found += [p.grad.clone() for p in model.parameters()]
        return found

    planned = trained({"0": parse_choice("recompute"), "2": parse_choice("recompute")})
    assert all(map(torch.equal, planned, trained({})))


def test_a_kernel_that_is_allowed_around_the_forward_alone() -> None:
    class Attends(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = super().forward(x).view(1, 2, 4, D)
            return (nn.functional.scaled_dot_product_attention(q, q, q) * torch.backends.cuda.flash_sdp_enabled()).exp()

    def trained(choices) -> torch.Tensor:
        torch.manual_seed(0)
        model, x = nn.Sequential(Attends(D, D)), torch.randn(8, D)
        with attach(model, choices):
            with sdpa_kernel(SDPBackend.MATH):
                loss = model(x).square().sum()
            loss.backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        return model[0].weight.grad  # type: ignore[return-value]

    wanted = trained({})
    for kind in ("recompute", "selective", "remake"):
        assert torch.equal(trained({"0": parse_choice(kind)}), wanted)


_FIRST_OF_A_PROCESS = """
import torch, transformers
from autockpt.runtime import attach
from autockpt.schema.choices import Segment, parse_choice
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
ids = torch.randint(0, 64, (2, 128), device="cuda")
with attach(model, dict.fromkeys(["model.layers.0", "model.layers.1"], parse_choice("recompute"))):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
assert all(map(torch.equal, found, (p.grad for p in model.parameters())))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_whose_first_attention_is_in_a_planned_unit() -> None:
    subprocess.run([sys.executable, "-c", _FIRST_OF_A_PROCESS], check=True)
