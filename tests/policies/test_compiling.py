"""Units that call compiled code: it stays compiled, what autockpt runs in between is not; gradients stay the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import parse_choice
from tests.errors import raises
from tests.policies.zoo import assert_equal, on, trained

D = 64
KINDS = ["recompute", "selective", "keep_attention", "offload", "recompute_offload", {"kind": "segment", "size": 2}]


def half_as_much_again(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend with bits of its own: what ran uncompiled shows."""
    return lambda *args: tuple(1.5 * out for out in graph(*args))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(nn.functional.gelu(self.a(x)), 0.1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 16, 4, -1).transpose(1, 2).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 16, D)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class Block(nn.Module):
    """``modules``: its parts are compiled in place, and not a function alone."""

    def __init__(self, backend: Any, modules: bool) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(D)), torch.compile(norm, backend=backend)
        self.mlp, self.attention = Mlp(), Attention()
        if modules:
            self.mlp.compile(backend=backend)
            self.attention.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x, self.weight))
        return x + self.mlp(torch.tanh(self.norm(x, self.weight)))


def rows() -> Tensor:
    return torch.randn(4, 16, D)


def blocks(backend: Any, modules: bool) -> nn.Module:
    torch.compiler.reset()
    return nn.Sequential(*(Block(backend, modules) for _ in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("modules", [False, True], ids=["function", "modules"])
@pytest.mark.parametrize("backend", [half_as_much_again, "aot_eager"], ids=["own", "aot_eager"])
def test_compiled_code_in_a_unit_runs_as_in_plain_training(backend: Any, modules: bool) -> None:
    make = partial(blocks, backend, modules)
    wanted = trained(make, {}, rows)
    for kind in KINDS[modules == (backend == "aot_eager") :: 2]:
        assert_equal(trained(make, on("01", kind), rows), wanted)


@pytest.mark.parametrize("modules", [False, True], ids=["function", "modules"])
def test_watching_choices_are_refused_around_compiled_code(modules: bool) -> None:
    with raises(ConflictError):
        trained(partial(blocks, half_as_much_again, modules), on("01", "remake"), rows)


@pytest.mark.slow
def test_flex_attention_which_torch_compiles_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch only refuses its backward; as it stands, unfused, it has one."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)

    class Flex(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(4, 16, 4, -1).transpose(1, 2).chunk(3, -1)
            out: Any = flex_attention.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1)
            return x + torch.tanh(out.transpose(1, 2).reshape(4, 16, D))

    wanted = trained(lambda: nn.Sequential(Flex(), Flex()), {}, rows, 3)
    for kind in KINDS:
        assert_equal(trained(lambda: nn.Sequential(Flex(), Flex()), on("01", kind), rows, 3), wanted)


class Residual(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(nn.functional.gelu(self.a(x)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recompute", "selective", "recompute_offload", "remake"])
def test_steps_go_on_where_the_compiler_has_given_up(kind: str) -> None:
    """From its limit of recompilations on a forward runs as it is, and so must its second run find it."""

    def make(compiled: bool) -> nn.Module:
        torch._dynamo.reset()
        model, rows[:] = nn.Sequential(*(Residual() for _ in range(3))), [16, 24, 40]
        for layer in model if compiled else ():
            layer.compile(backend="aot_eager")
        return model

    rows, batch = list[int](), lambda: torch.randn(rows.pop(0), D)
    with torch._dynamo.config.patch(recompile_limit=2):
        got = trained(partial(make, True), on("0", "recompute") | on("1", kind), batch, 3)
    torch.testing.assert_close(got, trained(partial(make, False), {}, batch, 3))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "warns"), [("remake", True), ("selective", False), ("recompute", False), ("offload", False)]
)
def test_layers_that_run_uncompiled_say_so(kind: str, warns: bool, recwarn: pytest.WarningsRecorder) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(Residual())
    with attach(model, {"0": parse_choice(kind)}):
        model[0].compile(backend="aot_eager")
        model(torch.randn(4, D)).sum().backward()
    said = [str(w.message) for w in recwarn if "run uncompiled" in str(w.message)]
    assert bool(said) == warns and all(f"`{kind}`" in text for text in said)
    torch._dynamo.reset()
