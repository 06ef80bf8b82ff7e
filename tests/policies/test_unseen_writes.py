"""Units whose code may write to tensors behind autograd's back, from the first call on or from a later one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from autockpt.errors import AutockptError, ConflictError, RerunMismatch
from autockpt.policies.rerun_state.code import Code
from autockpt.policies.rerun_state.reach import code_of
from autockpt.runtime import attach
from autockpt.schema.choices import from_label
from tests.policies.zoo import assert_equal
from tests.runtime.processes import in_two_processes, needs_gloo

KINDS = ("recompute", "selective", "remake", "offload", "segment", "recompute_offload")
D = 64


class Unit(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], Tensor], late: int) -> None:
        super().__init__()
        self.a, self.b, self.write, self.late = nn.Linear(D, D), nn.Linear(D, D), write, late
        self.act = nn.Tanh()
        self.calls, self.average = 0, [torch.zeros(())]

    def reset(self) -> None:
        self.a.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(torch.tanh(self.a(self.write(self, x) if self.calls > self.late else x)))


def assigned(unit: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    y = torch.exp(h * 0.1) * h
    h.data = h.data * 0.5
    return y * h


def assigned_to_what_only_its_op_saved(unit: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    h.data = h.data * 0.5
    return h


def written_by_numpy(unit: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    y = torch.exp(h * 0.1) * h
    h.detach().numpy()[...] *= 0.5
    return y * h


def written_by_data(unit: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    y = torch.exp(h * 0.1) * h
    h.data.mul_(0.5)
    return y * h


def written_by_data_after_a_gradient(unit: Any, x: Tensor) -> Tensor:
    h = x * 2.0
    y = torch.exp(h) * h
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    h.data[1:].mul_(0.5)
    return y * h


def handed_out_before_it_is_read(unit: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x * 2.0)
    array = h.detach().numpy()
    y = torch.exp(h.detach() * 0.1) * x
    array *= 0.5
    return y


def written_by_what_is_left_of_it(unit: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x)
    e = torch.exp(h * 0.1)
    left, y = e.data, e * h
    del e
    h.data.mul_(0.5)
    left.mul_(0.5)
    return y * h


def written_by_storage(unit: Any, x: Tensor) -> Tensor:
    h = unit.act(x)
    y = torch.exp(h * 0.1) * h.sin().cos()
    h.untyped_storage().fill_(0)
    return y * h


def written_outside_of_the_part_that_made_it(unit: Any, x: Tensor) -> Tensor:
    h = unit.act(x)
    y = torch.exp(h * 0.1) * h
    h.data.mul_(0.5)
    return y * h


def a_product_written_to(unit: Any, x: Tensor) -> Tensor:
    h = unit.b(x)
    h.data.mul_(0.5)
    return x + h.sin()


def an_average_by_data(unit: Any, x: Tensor) -> Tensor:
    unit.average[0].data.add_(1)
    return x * (1 + unit.average[0])


def trained(write: Callable[[Any, Tensor], Tensor], late: int, kind: str | None, **sentinels: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Unit(write, late), nn.Linear(D, D))
    seen: dict[str, Tensor] = {}
    with attach(model, {} if kind is None else {"1": from_label(kind)}, **sentinels):
        for step in range(5):
            model(torch.randn(32, D)).pow(2).mean().backward()
            seen |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return seen | {"average": model[1].average[0].clone()}  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 3], ids=["at once", "late"])
@pytest.mark.parametrize("write", [written_by_numpy, an_average_by_data, assigned_to_what_only_its_op_saved])
@pytest.mark.parametrize("kind", KINDS)
def test_right_or_refused_whenever_they_begin(kind: str, write: Callable[[Any, Tensor], Tensor], late: int) -> None:
    wanted = trained(write, late, None)
    try:
        got = trained(write, late, kind)
    except AutockptError:
        # what a later op reads of it is not what an earlier one has saved
        assert write is written_by_numpy or "recompute" in kind or kind in ("segment", "selective")
    else:
        assert_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sentinels", ["off", "sample"])
@pytest.mark.parametrize("late", [0, 3], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("write", "choice"),
    [
        (written_by_data, "remake"),
        (written_by_data_after_a_gradient, "remake"),
        (written_by_what_is_left_of_it, "remake"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_made_again_is_what_was_written_wherever_objects_lie(
    write: Callable[[Any, Tensor], Tensor], choice: str, late: int, sentinels: str
) -> None:
    wanted = trained(write, late, None)
    for size in range(0, 400, 80):
        between = [bytearray(size + i % 7) for i in range(size)]
        del between[::2]
        assert_equal(trained(write, late, choice, sentinels=sentinels), wanted)


@pytest.mark.parametrize("late", [0, 3], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("write", "choice"),
    [
        (written_by_numpy, "remake"),
        (handed_out_before_it_is_read, "remake"),
        (written_by_storage, "remake"),
        (written_outside_of_the_part_that_made_it, '{"kind": "remake", "within": ["act"]}'),
    ],
)
def test_what_no_op_shows_is_right_or_refused(write: Callable[[Any, Tensor], Tensor], choice: str, late: int) -> None:
    wanted = trained(write, late, None)
    try:
        assert_equal(trained(write, late, choice), wanted)
    except RerunMismatch as error:
        assert "1" in error.message


@pytest.mark.parametrize("late", [0, 3], ids=["at once", "late"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_is_written_to_is_no_other_without_sentinels(kind: str, late: int) -> None:
    wanted = trained(a_product_written_to, late, None)
    assert_equal(trained(a_product_written_to, late, kind, sentinels="off"), wanted)


class Shared(nn.Module):
    """Reduces a statistic, a product and what it returns over all processes, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        product = self.a(torch.tanh(x - mean / 2) * mean.exp())
        with torch.no_grad():
            dist.all_reduce(product)
        out = x + self.b(product.sin())
        return AllReduced.apply(out)


class AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


def trained_together(rank: int) -> list[str]:
    def gradients(choice: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Shared() for _ in range(3)))
        with attach(model, {} if choice is None else dict.fromkeys("012", choice), sentinels="off"):
            for step in range(3):
                torch.manual_seed(2 * step + rank)
                model(torch.randn(8, D)).pow(2).mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted, wrong = gradients(None), []
    for kind in (*KINDS, '{"kind": "segment", "size": 3}', '{"kind": "remake", "keep": ["**"]}'):
        try:
            got = gradients(from_label(kind))
        except ConflictError as error:
            if "remake" not in kind or "custom autograd function" not in error.message:
                raise
        else:
            wrong += [f"{kind} {name}" for name in wanted if not torch.equal(got[name], wanted[name])]
    return wrong


@needs_gloo
@pytest.mark.slow
def test_what_is_reduced_over_processes_in_place(tmp_path: Path) -> None:
    assert in_two_processes(trained_together, tmp_path) == []


def test_remake_refuses_assignments_without_sentinels_too() -> None:
    with pytest.raises(ConflictError, match=r"1 assigns to the \.data of a tensor"):
        trained(assigned, 0, "remake", sentinels="off")


def test_code_that_a_forward_does_not_come_to_does_not_count() -> None:
    def nothing(unit: Any, x: Tensor) -> Tensor:
        return x

    assert code_of("1", Unit(nothing, 0)) == Code()  # ``reset`` names .data
    assert code_of("1", Unit(an_average_by_data, 0)) == Code(writes_unseen=True, writes_to_any=True)
    assert code_of("1", Unit(assigned, 0)) == Code(writes_unseen=True, writes_to_any=True, assigns=True)


def test_code_in_closures_counts_and_all_names_for_a_tensors_memory() -> None:
    def closed(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda unit, x: function(unit, x)

    def by_numpy(unit: Any, x: Tensor) -> Tensor:
        np.atleast_1d(x.detach())[:] = 0
        return x

    for function in (by_numpy, closed(by_numpy)):
        assert code_of("1", Unit(function, 0)) == Code(writes_unseen=True, writes_to_any=True)
    assert code_of("1", Unit(closed(assigned), 0)).assigns


class Kept(nn.Module):
    """The product is kept by ``selective``, so that the bias is not read again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("kind", ["selective", "recompute"])
def test_a_weight_written_before_backward_matters_where_it_is_read_again(kind: str) -> None:
    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), Kept(), nn.Linear(D, D))
        with attach(model, choices):
            loss = model(torch.randn(32, D)).sum()
            model[1].a.bias.data = model[1].a.bias.data + 1  # type: ignore[union-attr]
            loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    choices = {"1": from_label(kind)}
    if kind == "selective":
        assert_equal(gradients(choices), gradients({}))
    else:
        with pytest.raises(RerunMismatch):
            gradients(choices)


@pytest.mark.parametrize("sentinels", ["sample", "off"])
@pytest.mark.parametrize("late", [0, 4])
@pytest.mark.parametrize("kind", ["offload", "remake", '{"kind": "remake", "keep": ["**"]}'])
def test_other_memory_assigned_to_weights_before_backward_is_read_where_autograd_would(
    kind: str, late: int, sentinels: Any
) -> None:
    def block() -> nn.Module:
        frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        read_from_views = nn.Linear(16, 16)
        return nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.SiLU(), frozen, read_from_views, nn.PReLU(4)
        )

    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(block(), block(), nn.Conv2d(4, 4, 1)), {}
        with attach(model, choices, sentinels=sentinels):
            for step in range(late + 3):
                model.zero_grad()
                loss = model(torch.randn(8, 4, 16, 16)).square().mean()
                if step >= late:
                    for tensor in (*model.parameters(), *model.buffers()):
                        tensor.data = tensor.data * 2
                loss.backward()
                found |= {f"{step} {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        return found

    assert_equal(gradients({"0": from_label(kind), "1": from_label(kind)}), gradients({}))


class EndsInTanh(nn.Module):
    def __init__(self, late: int) -> None:
        super().__init__()
        self.a, self.late, self.calls = nn.Linear(D, D), late, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.a(x)
        return torch.tanh(x) if self.calls > self.late else x + 1


class Around(nn.Module):
    """Its own forward, or that of a module behind the unit, writes to what the unit has returned."""

    def __init__(self, by: str, late: int) -> None:
        super().__init__()
        self.first, self.unit, self.by = nn.Linear(D, D), EndsInTanh(late), by
        self.last = Clamps() if by == "sibling" else Sine()
        if by == "hook":
            self.unit.register_forward_hook(lambda unit, given, out: self.halve(out))

    def halve(self, x: Tensor) -> None:
        if self.unit.calls > self.unit.late:
            x.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.unit(self.first(x))
        if self.by == "forward":
            self.halve(x)
        if self.by == "reads":
            self.seen = x.data.sum()
        return self.last(x) * 2


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Clamps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy().clip(-0.1, 0.1, out=x.detach().numpy())
        return x.sin()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["forward", "sibling", "hook", "reads"])
def test_what_a_unit_returned_is_written_to_around_it_and_it_begins_late_to_read_that(by: str, kind: str) -> None:
    def gradients(choices: dict[str, Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Around(by, late=5)
        seen: dict[str, Tensor] = {}
        with attach(model, choices):
            for step in range(8):
                model(torch.randn(32, D)).pow(2).mean().backward()
                seen |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return seen

    wanted = gradients({})
    try:
        got = gradients({"unit": from_label(kind)})
    except (RerunMismatch, ConflictError):
        assert by != "reads"
    else:
        assert_equal(got, wanted)


class Scripted(nn.Module):
    """As Megatron's blocks, which end in a function of TorchScript: what that saves is the unit's last."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bias = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.down(torch.tanh(self.up(x))), self.bias, x)


@torch.jit.script
def gated(x: Tensor, bias: Tensor, rest: Tensor) -> Tensor:
    return rest * torch.sigmoid(x + bias)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_torchscript_that_hold_a_units_last_saved_tensor(kind: str) -> None:
    def train(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Scripted(), Scripted())
        with attach(model, dict.fromkeys(("0", "1"), from_label(kind)), sentinels="sample"):
            for _ in range(4):
                model(torch.randn(4, D)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    train("save")  # it is compiled anew in its first calls
    for found, wanted in zip(train(kind), train("save"), strict=True):
        assert torch.equal(found, wanted)
    # which graph it runs may change at any call, so every call is compared as a whole
    assert code_of("0", Scripted()).writes_unseen and not code_of("0", nn.Linear(2, 2)).writes_unseen


class Observed(nn.Module):
    """Observes its values for quantisation, from when on a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.observer = nn.Linear(D, D), FusedMovingAvgObsFakeQuantize()
        self.observer.disable_observer()
        self.observer.disable_fake_quant()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.observer(self.inner(x)))


class Normed(nn.Module):
    """Running statistics without a count of them, of which nothing tells."""

    started: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.norm.num_batches_tracked = None
        self.register_buffer("started", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train(bool(self.started))
        return torch.tanh(self.norm(self.inner(x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", (Observed, Normed))
def test_statistics_that_nothing_tells_of_begin_late(unit: type[nn.Module], kind: str) -> None:
    def train(kind: str) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(unit(), unit())
        with attach(model, dict.fromkeys(("0", "1"), from_label(kind)), sentinels="sample"):
            for step in range(9):
                if step == 4:
                    for each in model:
                        each.observer.enable_observer() if unit is Observed else each.started.fill_(1.0)
                if step == 7 and unit is Observed:
                    for each in model:
                        each.observer.disable_observer()
                        each.observer.enable_fake_quant()
                model(torch.randn(4, D) * (1 + step)).square().mean().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    for found, wanted in zip(train(kind), train("save"), strict=True):
        assert torch.equal(found, wanted)
