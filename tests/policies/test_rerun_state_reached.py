"""What a forward changes outside of its own module: hooks that it registers, other units, objects of classes derived
from libraries', an optimizer of its own. Changed once by each forward, as in plain training."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autockpt.errors import ConflictError
from autockpt.policies.rerun_state.libraries import is_opaque
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, KeepAttention, parse_choice
from tests.policies import reached_by_import as reached
from tests.policies.zoo import assert_equal

D = 8
CHOICES = [Segment(size=2), *map(parse_choice, ("remake", "offload"))]


class Layer(nn.Module):
    """``change(self, x)`` is what it does besides; ``before``: the layer before it, no child of its."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], before: Layer | None) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.change = nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D), change
        self.before, self.ready, self.shared = [before] if before is not None else [], False, torch.ones(D)
        self.norm.scale = 1.0  # type: ignore[assignment]
        self.fast = [nn.Linear(D, D)]
        self.adam = torch.optim.Adam(self.fast[0].parameters(), lr=0.01)
        self.config: Any = None
        self.calls, self.model, self.far = 0, list[Any](), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.change(self, x)) + self.shared))


class Config(transformers.PretrainedConfig):
    calls = 0


class Model(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Tensor], config: Any) -> None:
        super().__init__()
        first = Layer(change, None)
        self.layers, self.bias = nn.ModuleList([first, Layer(change, first)]), nn.Parameter(torch.ones(D))
        self.config: Any = config
        for layer in self.layers:
            layer.config = config  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        shared = self.bias * 1.5
        for layer in self.layers:
            layer.shared = shared  # type: ignore[assignment]
            x = layer(x)
        return x * (1 + self.config.calls / 100)


def hook_on_a_parameter(layer: Any, x: Tensor) -> Tensor:
    if not layer.ready:
        layer.a.weight.register_hook(lambda gradient: gradient * 0.5)
        layer.ready = True
    return x


def hook_on_a_gradient_that_is_there(layer: Any, x: Tensor) -> Tensor:
    if not layer.ready:
        layer.a.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
        layer.ready = True
    return x


def hook_on_a_module(layer: Any, x: Tensor) -> Tensor:
    if not layer.ready:
        layer.b.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
        layer.ready = True
    return x


def hook_on_a_node(layer: Any, x: Tensor) -> Tensor:
    layer.shared.grad_fn.register_hook(lambda given, got: (given[0] * 0.5, *given[1:]))
    return x


def another_unit_is_called(layer: Any, x: Tensor) -> Tensor:
    return x + sum(other(x) for other in layer.before)


def a_norm_of_another_unit(layer: Any, x: Tensor) -> Tensor:
    return next(iter([*layer.before, layer])).norm(x)


def a_number_in_another_unit(layer: Any, x: Tensor) -> Tensor:
    for other in layer.before:
        other.norm.scale *= 0.9
    return x * layer.norm.scale


def a_count_in_a_configuration(layer: Any, x: Tensor) -> Tensor:
    layer.config.calls += 1
    return x


def an_optimizer_of_its_own(layer: Any, x: Tensor) -> Tensor:
    (layer.fast[0](x.detach()) - x.detach()).pow(2).mean().backward()
    layer.adam.step()
    layer.adam.zero_grad()
    return x + layer.fast[0](x.detach())


CHANGES = [
    hook_on_a_parameter,
    hook_on_a_gradient_that_is_there,
    hook_on_a_module,
    hook_on_a_node,
    another_unit_is_called,
    a_norm_of_another_unit,
    a_number_in_another_unit,
    a_count_in_a_configuration,
    an_optimizer_of_its_own,
]


def run(model: Model) -> dict[str, Tensor]:
    seen = {}
    for step in range(4):
        model.zero_grad()
        x = torch.arange(4.0 * D).view(4, D).sin() * (step + 1)
        model(x).pow(2).sum().backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return seen | {name: buffer.clone() for name, buffer in model.named_buffers()}


def make(change: Callable[[Any, Tensor], Tensor], config: Callable[[], Any]) -> Model:
    torch.manual_seed(0)
    return Model(change, config())


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_each_forward_does_it_once(change: Callable[[Any, Tensor], Tensor], choice: Any) -> None:
    wanted, model = run(make(change, Config)), make(change, Config)
    with attach(model, {"layers.0": choice, "layers.1": choice}, sentinels="all"):
        assert_equal(run(model), wanted)


def a_number_in_a_part_of_another_unit_late(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return a_number_in_another_unit(layer, x) if layer.calls > 2 else x * layer.norm.scale


PARTS = {"a": Segment(size=1), "norm": Segment(size=1)}


@pytest.mark.parametrize("change", [a_number_in_another_unit, a_number_in_a_part_of_another_unit_late])
def test_parts_of_another_unit_that_choices_are_attached_to(change: Callable[[Any, Tensor], Tensor]) -> None:
    wanted, model = run(make(change, Config)), make(change, Config)
    of_parts = {f"layers.0.{part}".rstrip("."): choice for part, choice in PARTS.items()}
    with attach(model, {**of_parts, "layers.1": Segment(size=1)}, sentinels="all"):
        assert_equal(run(model), wanted)


def test_a_part_that_is_met_by_way_of_the_whole_model_first() -> None:
    def change(layer: Any, x: Tensor) -> Tensor:
        found = layer.far
        while type(found) is list and found:
            found = found[0]
        if found:
            found.norm.scale *= 0.9
        return x * layer.norm.scale

    def made() -> Model:
        model = make(change, Config)
        last: Any = model.layers[1]
        last.far, last.before, last.model = last.before, [], [model]
        for _ in range(12):
            last.far = [last.far]
        return model

    wanted, model = run(made()), made()
    with attach(model, {"layers.0": parse_choice("offload"), "layers.1": Segment(size=1)}, sentinels="all"):
        assert_equal(run(model), wanted)


def library_config() -> Any:
    config = transformers.LlamaConfig()
    config.calls = 0
    return config


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_configuration_of_a_librarys_own_class_counts_too(choice: Any) -> None:
    wanted, model = (
        run(make(a_count_in_a_configuration, library_config)),
        make(a_count_in_a_configuration, library_config),
    )
    with attach(model, {"layers.0": choice, "layers.1": choice}, sentinels="all"):
        assert_equal(run(model), wanted)


class Examples(torch.utils.data.Dataset[int]):
    pass


class Own(torch.optim.SGD):
    pass


class Tokens(transformers.PreTrainedTokenizerBase):
    pass


@pytest.mark.parametrize("left_alone", [Examples, Own, Tokens, torch.optim.Adam, transformers.Trainer])
def test_data_sets_optimizers_and_tokenizers_are_left_alone(left_alone: type) -> None:
    assert is_opaque(left_alone) and not is_opaque(Config)


LOG: list[float] = []


@torch.no_grad()
def note(x: Tensor) -> int:
    LOG.append(float(x.mean()))
    return len(LOG)


@contextmanager
def noted() -> Iterator[None]:
    LOG.append(0.0)
    yield
    LOG.append(1.0)


@functools.singledispatch
def on(x: Any) -> None:
    raise TypeError


@on.register
def _(x: Tensor) -> None:
    LOG.append(2.0)


class Numbered:
    def __init__(self) -> None:
        LOG.append(4.0)
        self.number = len(LOG)

    def __len__(self) -> int:
        LOG.append(5.0)
        return len(LOG)


def in_a_closure(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A decorator that does not say what it decorates."""

    def inner(x: Tensor) -> Tensor:
        return function(x)

    return inner


class Helper(nn.Module):
    """Its forward changes what only a decorator, a built-in method, a slot or an import leads to."""

    __slots__ = ("slot",)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.w, self.how, self.kept = nn.Linear(D, D), how, list[float]()
        self.keep, self.draw, self.failed = self.kept.append, random.Random(1).random, 0
        self.next = itertools.count(1).__next__
        object.__setattr__(self, "slot", 0)

        def handling(x: Tensor) -> Tensor:
            try:
                return torch.tanh(self.w(x))
            except Exception:
                self.failed += 1
                raise

        self.closed = in_a_closure(handling)
        self.register_buffer("seen", torch.zeros(1))

    @torch.no_grad()
    def count(self) -> None:
        self.seen.data.add_(1)  # type: ignore[operator, union-attr]

    @torch.autocast("cpu", torch.bfloat16, enabled=False)
    def decorated(self, x: Tensor) -> Tensor:
        LOG.append(3.0)
        return torch.tanh(self.w(x)) * len(LOG)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "no_grad":
                return torch.tanh(self.w(x) * (1 + note(x) / 10))
            case "no_grad on a method":
                self.count()
                return torch.tanh(self.w(x) * (1 + self.seen / 10))  # type: ignore[operator]
            case "autocast":
                return self.decorated(x)
            case "contextmanager":
                with noted():
                    return torch.tanh(self.w(x))
            case "singledispatch":
                on(x)
                return torch.tanh(self.w(x) * (1 + len(LOG) / 10))
            case "a bound append":
                self.keep(1.0)
                return torch.tanh(self.w(x) * (1 + len(self.kept) / 10))
            case "a bound generator":
                return torch.tanh(self.w(x) * (1 + self.draw()))
            case "a bound __next__":
                return torch.tanh(self.w(x) * self.next())
            case "special methods":
                return torch.tanh(self.w(x) * (Numbered().number + len(Numbered())))
            case "a slot":
                object.__setattr__(self, "slot", self.slot + 1)
                return torch.tanh(self.w(x) * self.slot)
            case "a relative import":
                from . import reached_by_import

                reached_by_import.calls += 1
                return torch.tanh(self.w(x) * reached_by_import.calls)
            case "a handler in a closure":
                return self.closed(x)
            case "clipped gradients":
                torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)
                return torch.tanh(self.w(x))
            case "an error raised from another":
                try:
                    return torch.tanh(self.w(x))
                except Exception:
                    other = KeyError("another")
                    other.__cause__ = other
                    raise ValueError("this layer failed") from other
            case "a handler that counts":
                try:
                    return torch.tanh(self.w(x))
                except Exception:
                    self.failed += 1
                    raise
            case _:
                try:
                    return torch.tanh(self.w(x))
                except Exception as error:
                    raise ValueError("this layer failed") from error


WAYS = ["no_grad", "no_grad on a method", "autocast", "contextmanager", "singledispatch", "a bound append"]
WAYS += ["a bound generator", "a bound __next__", "special methods", "a slot", "a relative import", "clipped gradients"]
WAYS += [
    "a handler in a closure",
    "a handler that counts",
    "an error raised from another",
    "a handler with an error of its own",
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("how", WAYS)
def test_what_decorators_built_in_methods_and_handlers_lead_to(how: str, choice: Any) -> None:
    def trained(choices: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(0)
        LOG.clear()
        reached.calls = 0
        model, seen = nn.Sequential(Helper(how), Helper(how)), dict[str, Tensor]()
        with attach(model, choices):
            for step in range(4):
                if how != "clipped gradients":
                    model.zero_grad()
                model(torch.full((2, D), step + 1.0)).pow(2).sum().backward()
                seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        counted = [[len(LOG)], *([len(m.kept), m.failed, float(m.seen)] for m in model)]  # type: ignore[union-attr,arg-type]
        return seen | {f"counted {i}": torch.tensor(numbers) for i, numbers in enumerate(counted)}

    assert_equal(trained({"0": choice, "1": choice}), trained({}))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_attention_of_somebodys_own_by_transformers_table(choice: Any) -> None:
    calls: list[float] = []

    def counting(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        calls.append(float(q.detach().mean()))
        out, weights = sdpa_attention_forward(module, q, k, v, mask, **more)
        return out * (1 + len(calls) / 10), weights

    def trained(choices: dict[str, Any]) -> dict[str, Tensor]:
        calls.clear()
        torch.manual_seed(0)
        sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="counting")
        model, ids, seen = transformers.LlamaForCausalLM(config), torch.arange(8)[None], dict[str, Tensor]()
        with attach(model, choices):
            for step in range(3):
                model.zero_grad()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return seen | {"calls": torch.tensor(len(calls))}

    transformers.AttentionInterface.register("counting", counting)
    try:
        assert_equal(trained(dict.fromkeys(("model.layers.0", "model.layers.1"), choice)), trained({}))
    finally:
        transformers.AttentionInterface._global_mapping.pop("counting")


def test_a_repetition_that_comes_to_an_end_is_refused() -> None:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.times = itertools.repeat(2.0, 9)

        def forward(self, x: Tensor) -> Tensor:
            return (x * next(self.times, 1.0)).sin()

    model = nn.Sequential(nn.Linear(D, D), Warm())
    with attach(model, {"1": KeepAttention()}), pytest.raises(ConflictError, match=r"1 advances 1\.times \(repeat\)"):
        model(torch.ones(2, D)).sum().backward()


def test_what_goes_wrong_in_the_second_run_alone_names_the_unit() -> None:
    class AsksForItsGraph(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.grad_fn.register_hook(lambda *gradients: None)  # type: ignore[union-attr]
            return x.sin()

    model = nn.Sequential(nn.Linear(D, D), AsksForItsGraph())
    with (
        attach(model, {"1": RECOMPUTE}),
        pytest.raises(ConflictError, match="1 raised AttributeError when it ran again"),
    ):
        model(torch.ones(2, D)).sum().backward()
