"""torch.compile around attached choices and plans: one graph where it can be, else an error that names the choice."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt import Plan, apply
from autockpt.runtime import attach
from autockpt.runtime.session import compiled_as
from autockpt.schema import Measurement
from autockpt.schema.choices import CompileBudget, choice_kinds, parse_choice
from autockpt.workload import discover_units
from tests.measuring.small_workloads import Block, Stack
from tests.policies.zoo import CASES, assert_equal, bytes_alive_after, on, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

LLAMA = CASES["llama"]
NO_CACHE = {"use_cache": False}
# aot_eager runs the very kernels that eager mode runs, so gradients can be compared bit for bit
AOT: dict[str, Any] = {"backend": "aot_eager"}


def make() -> nn.Module:
    """Without dropout: compiled random numbers are others. Eager attention, which the CPU compiles bit for bit. Two
    layers, so that there is a neighbour; each further one only takes the compiler longer."""
    model = LLAMA.make().eval()
    model.model.layers = model.model.layers[:2]
    model.config._attn_implementation = "eager"
    return model


def run(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(**LLAMA.batch(), **NO_CACHE).loss.backward()
    return {n.replace("_orig_mod.", ""): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compiled(model: nn.Module, where: str, fullgraph: bool) -> nn.Module:
    if where == "whole":
        return torch.compile(model, fullgraph=fullgraph, **AOT)  # type: ignore[return-value]
    for layer in model.model.layers:  # type: ignore[reportGeneralTypeIssues]
        layer.compile(fullgraph=fullgraph, **AOT)
    return model


@pytest.fixture(scope="module")
def wanted() -> dict[str, Tensor]:
    return run(make())


KINDS = sorted(set(choice_kinds("block")) - {"save"})
# a whole model takes long, what keeps some ops is within its layers, and budgets have a test below
WHOLE = [kind for kind in KINDS if kind not in ("keep_attention", "selective", "compile_budget")]


@pytest.mark.parametrize(("kind", "where"), [*((k, "layers") for k in KINDS), *((k, "whole") for k in WHOLE)])
@pytest.mark.filterwarnings("error:.*lru_cache:UserWarning")
def test_one_graph_or_an_error_with_the_choices_name(kind, where, wanted):
    model = compiled(make(), where, fullgraph=True)
    with attach(model, LLAMA.choices(model, parse_choice(kind))) as session:
        session.guard.planned = (1, 1) if kind == "recompute" else ()  # a larger batch is said, and breaks no graph
        try:
            assert_equal(run(model), wanted)
        except torch._dynamo.exc.Unsupported as error:
            assert kind != "recompute"
            assert f"`{kind}`" in str(error) and "without fullgraph=True" in str(error)
        else:
            return
    if where == "whole":
        return  # a model in a dozen graphs takes the compiler long; one layer breaks in the same places
    torch._dynamo.reset()
    model = compiled(make(), where, fullgraph=False)
    with attach(model, LLAMA.choices(model, parse_choice(kind))):
        assert_equal(run(model), wanted)
        assert_equal(run(model), wanted)


@pytest.mark.parametrize("kind", ["offload", "recompute_offload"])
def test_what_moves_is_not_compiled_again_for_every_layer(kind):
    """Else torch gives up on layers beyond its limit, and these run eagerly."""

    def make() -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(*(Block(0.0) for _ in range(6)))
        for layer in model:
            layer.compile(**AOT)
        return model

    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        found = trained(make, on("012345", kind), lambda: torch.randn(1024, 16), 3)
    assert_equal(found, trained(make, {}, lambda: torch.randn(1024, 16), 3))


# --- plans for compiled training, applied before or after compiling, and where they do not belong

CHEAP: dict[str, Any] = {"backend": "aot_eager_decomp_partition"}
NAMES = [f"layers.{i}" for i in range(3)]


def stack() -> Stack:
    torch.manual_seed(0)
    made = Stack(dropout=0.0)
    made.layers = made.layers[: len(NAMES)]
    return made


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 16, requires_grad=True)


def compile_in_place(model: nn.Module, mode: str) -> None:
    for module in model.layers if mode == "layers" else [model]:  # type: ignore[union-attr]
        module.compile(**CHEAP)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept(model: nn.Module) -> int:
    return bytes_alive_after(lambda: model(batch()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layers", "model"])
@pytest.mark.parametrize("first", ["apply", "compile"])
def test_a_plan_acts_whether_applied_before_or_after_compiling(mode: str, first: str):
    plain = stack()
    compile_in_place(plain, mode)
    wanted, most = gradients_of(plain), kept(plain)
    torch._dynamo.reset()
    model = stack()
    tight, measured = CompileBudget(fraction=0.1), Measurement(peak_bytes=2**20, step_seconds=0.5)
    units = discover_units(model)
    plan = Plan.create(dict.fromkeys(NAMES, tight), units, source="measured", compile=mode, measured=measured)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if first == "compile":
            compile_in_place(model, mode)
        with apply(model, plan):
            if first == "apply":
                compile_in_place(model, mode)
            found = gradients_of(model)
            assert kept(model) < 0.7 * most
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_plan_for_other_steps_than_compiled_ones_is_doubted():
    model = stack()
    compile_in_place(model, "layers")
    choices = dict.fromkeys(NAMES, parse_choice("recompute"))
    measured = Measurement(peak_bytes=2**20, step_seconds=0.5)
    plan = Plan.create(choices, discover_units(model), source="measured", measured=measured)
    with pytest.warns(UserWarning, match="the model is compiled"), apply(model, plan) as handle:
        assert any("compiled" in note for note in handle.notes)


def test_how_a_model_is_compiled_is_seen():
    model = stack()
    assert compiled_as(model, NAMES) is None
    model.layers[2].compile(**CHEAP)
    assert compiled_as(model, NAMES) == "layers"
    assert compiled_as(torch.compile(stack(), **CHEAP), NAMES) == "model"  # type: ignore[arg-type]
    wrapped = stack()
    wrapped.layers[0] = torch.compile(wrapped.layers[0], **CHEAP)  # type: ignore[assignment]
    assert compiled_as(wrapped, NAMES) == "layers"
