"""What is written down about each op, on real tensors: storages, phases, modules, in-place additions, saved tensors."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autockpt.tracing.location import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from autockpt.tracing.recorder import OpRecord, RealRecorder
from tests.tracing.reference import op_counts


def recorder(model: nn.Module | None = None) -> RealRecorder:
    made = RealRecorder(torch.device("cpu"))
    if model is not None:
        made.location.bind(model)
        made.log.adopt(model.parameters())
    return made


def names(ops: list[OpRecord]) -> list[str]:
    return [op.call.operator.base for op in ops]


def test_births_deaths_inputs_and_offsets() -> None:
    made = recorder()
    with made.recording():
        a = torch.ones(8)
        b = a[2:].mul(2)
        del a
        c = b + b
        del b, c
    assert names(made.ops) == ["ones", "slice", "mul", "add"]
    assert made.log.birth == [0, 2, 3]
    assert made.log.death == [2, 3, 3]
    assert made.ops[2].inputs == (0,) and made.ops[2].offsets == (2,)
    assert made.ops[3].inputs == (1, 1) and made.ops[3].offsets == ()
    assert made.ops[1].outputs[0].layout == ((6,), (1,), "f32")
    assert made.ops[1].outputs[0].offset == 2


def test_what_was_there_before_is_resident() -> None:
    before = torch.ones(4)
    made = recorder()
    with made.recording():
        before.mul(2)
        torch.tensor([1.0, 2.0])
    assert made.log.birth[made.ops[0].inputs[0]] == -1
    assert all(made.log.birth[s] >= 0 for op in made.ops[1:] for s in op.inputs)


def test_nothing_is_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    made = recorder(model)
    gc.disable()
    try:
        with made.recording():
            hidden = model(torch.ones(2, 8))
            alive = weakref.ref(hidden.untyped_storage())
            hidden.sum().backward()
            del hidden
            assert alive() is None
        with pytest.raises(RuntimeError), made.recording():
            lost = torch.ones(3)
            gone = weakref.ref(lost)
            torch.mm(lost, lost)
        del lost
        assert gone() is None
    finally:
        gc.enable()


def test_phases_and_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=False)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = recorder(model)
    with made.recording():
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        made.location.mark("optimizer")
        optimizer.step()
    paths = made.location.paths
    seen = {(op.phase, paths[op.module]) for op in made.ops if op.call.operator.base in ("addmm", "mm", "relu", "pow")}
    assert seen >= {(FORWARD, "a"), (FORWARD, "b.0"), (FORWARD, ""), (BACKWARD, "a"), (BACKWARD, "b.2")}
    assert {path for phase, path in seen if phase == RECOMPUTE} == {"b.0"}  # it stops where all is there again
    assert {op.phase for op in made.ops if op.call.operator.base == "add_" and not op.call.flops} >= {OPTIMIZER}
    weights = [op for op in made.ops if op.phase == BACKWARD and op.call.operator.base == "mm"]
    assert {paths[op.module] for op in weights} == {"a", "b.0", "b.2"}


def test_storages_of_parameters_gradients_are_known() -> None:
    model = nn.Linear(4, 4)
    made = recorder(model)
    with made.recording():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    own = {made.log.find(p.grad) for p in model.parameters() if p.grad is not None}
    assert own <= made.gradients


def branches(x: Tensor) -> Tensor:
    return x.sin() + x.cos() + x.exp()


def mixed_views(x: Tensor) -> Tensor:
    return x.view(4, 4).t().reshape(-1).sin() + x.view(2, 8).sum() + x.cos()


class AddsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        fresh = grads[0] * 2
        return fresh + grads[0] * 3


def product_and_bias(x: Tensor) -> Tensor:
    square = x.view(4, 4)
    by_operator = torch.nn.functional.linear(square.expand(2, 4, 4), square.expand(4, 4), square[0].clone())
    by_hand = torch.bmm(square.unsqueeze(0), square.unsqueeze(0)) + square
    return by_operator.sum() + by_hand.sum()


def call(function: Any, *args: Tensor) -> Tensor:
    return function(*args)


def product_and_bias_by_a_helper(x: Tensor) -> Tensor:
    square, total = x.view(4, 4), x.sum()
    for _ in range(3):  # the first frame of a helper may lie elsewhere than the second
        product = call(torch.mm, square, square)
        total = total * call(torch.add, product, square).sum()
    return total


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def product_and_bias_under_a_mode(x: Tensor) -> Tensor:
    square = x.view(4, 4)
    with Passing():
        by_operator = torch.nn.functional.linear(square.expand(2, 4, 4), square.expand(4, 4), square[0].clone())
        return by_operator + (torch.mm(square, square) + square)


def masked_attention(x: Tensor) -> Tensor:
    q = x.view(1, 1, 4, 4)
    mask = torch.zeros(4, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5).sum()


@pytest.mark.parametrize(
    "function",
    [
        branches,
        mixed_views,
        AddsInBackward.apply,
        product_and_bias,
        product_and_bias_by_a_helper,
        product_and_bias_under_a_mode,
        masked_attention,
        torch.var_mean,
    ],
)
def test_additions_are_in_place_exactly_where_a_plain_step_makes_them_so(function: Any) -> None:
    def step() -> None:
        result = function(leaf * 1.0)
        (result if isinstance(result, Tensor) else result[0] + result[1]).sum().backward()

    leaf = torch.rand(16, requires_grad=True)
    step()
    real = op_counts(step)
    made = recorder()
    with made.recording():
        step()
    found = names(made.ops)
    assert (found.count("add_"), found.count("add")) == (real["add_"], real["add"])


def test_a_gradient_that_someone_holds_is_not_overwritten() -> None:
    held: list[Tensor] = []
    leaf = torch.rand(16, requires_grad=True)
    made = recorder()
    with made.recording():
        hidden = leaf * 1.0
        first = hidden.sin()
        first.register_hook(lambda gradient: held.append(gradient))
        (first.view(16) + hidden.cos()).sum().backward()
    copies = [gradient.clone() for gradient in held]
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    expected = leaf.detach().cos() - leaf.detach().sin()
    assert leaf.grad is not None and torch.allclose(leaf.grad, expected)


def test_saved_tensors_by_op() -> None:
    leaf = torch.rand(4, 4, requires_grad=True)
    made = recorder()
    with made.recording():
        loss = leaf.mul(2).sigmoid().mm(leaf).sum()
    saves = {made.ops[i].call.operator.base: sids for i, sids in made.saved.by_op.items() if sids}
    sigmoid = next(op for op in made.ops if op.call.operator.base == "sigmoid").outputs[0].storage
    assert saves["sigmoid"] == [sigmoid]
    assert set(saves["mm"]) == {sigmoid, made.log.find(leaf)}
    assert "mul" not in saves
    del loss


def test_saved_tensors_of_python_functions() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.kept = x * 2
            return x**3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0] ** 2 * grads[0]

    leaf = torch.rand(4, requires_grad=True)
    made = recorder()
    with made.recording():
        loss = Cube.apply(leaf * 1).sum()  # type: ignore[union-attr]
    (saving,) = (sids for sids in made.saved.by_op.values() if len(sids) == 2)
    assert {made.log.bytes[s] for s in saving} == {16}
    del loss


def test_hooks_of_others_keep_working_and_decide_what_is_saved() -> None:
    unpacked = []
    leaf = torch.rand(8, requires_grad=True)
    made = recorder()
    with made.recording():
        with saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t):
            kept = (leaf * 1).exp()
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: unpacked.append(1) or t):
            away = (leaf * 1).exp()
        assert sum(map(len, made.saved.by_op.values())) == 1
        (kept + away).sum().backward()
    assert unpacked == [1, 1]
    assert leaf.grad is not None and torch.allclose(leaf.grad, 2 * leaf.detach().exp())


@pytest.mark.filterwarnings("error::FutureWarning")
def test_checkpoint_does_not_take_the_recorder_for_hooks_of_the_user() -> None:
    """Since torch 2.15 what selective checkpointing keeps can go through the user's hooks; its own are none."""
    options: list[dict[str, Any]] = [{}]
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
        options.append({"respect_saved_tensors_hooks": True})
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    leaf, weight = torch.rand(4, 8, requires_grad=True), torch.rand(8, 8)
    (wanted,) = torch.autograd.grad(((leaf @ weight).sin() @ weight).sum(), leaf)
    for option in options:
        made = recorder()
        with made.recording():
            loss = checkpoint(
                lambda x: (x @ weight).sin() @ weight, leaf, use_reentrant=False, context_fn=contexts, **option
            ).sum()
            (got,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(got, wanted)
        assert names(made.ops).count("mm") == 4, "two forwards and two of backward: none runs again"


def test_random_states_count_where_the_device_is_the_cpu() -> None:
    made = recorder()
    with made.recording():
        torch.ones(1)
        state = torch.get_rng_state()
        torch.ones(1)
    sid = made.log.find(state)
    assert sid is not None and made.log.bytes[sid] == state.numel() and made.log.birth[sid] == 1
