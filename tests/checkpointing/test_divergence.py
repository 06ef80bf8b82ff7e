"""What the check of recomputed tensors notices, and what it must leave alone."""

import copy
import gc
import io
import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.checkpointing import divergence
from autockpt.checkpointing.fingerprint import left_unwritten
from autockpt.checkpointing.replay_context import recomputing
from autockpt.errors import AutockptError, RerunMismatch, UsageError
from autockpt.runtime import Session, attach
from autockpt.schema.choices import Segment
from tests.errors import raises
from tests.policies.zoo import Row, assert_as_plain, bytes_alive_after, on

RERUNNING = ("recompute", "selective", "keep_attention", "recompute_offload", Segment(size=2))
each_rerun = pytest.mark.parametrize("kind", RERUNNING, ids=str)
WIDTH = 64


class Unit(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def model_of(body: Callable[[Any, Tensor], Tensor], between: Callable[[Tensor], Any] = id) -> nn.Module:
    torch.manual_seed(0)
    return Row(lambda: Unit(body), 2, between)


UNITS = ("units.0", "units.1")


def attached(model: nn.Module, kind: Any, **more: Any) -> Session:
    return attach(model, on(UNITS, kind), **more)


BATCH = torch.randn(4, 80, WIDTH, generator=torch.Generator().manual_seed(1))  # large enough to leave the device


def step(model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    model(BATCH).pow(2).mean().backward()
    return [p.grad for p in model.parameters()]


def mlp(unit: Any, x: Tensor) -> Tensor:
    return unit.b(torch.tanh(unit.a(x)))


def unrepeatable(unit: Any, x: Tensor) -> Tensor:
    """What no state that could be restored explains."""
    return mlp(unit, x * (1 + random.SystemRandom().random()))


@each_rerun
def test_a_rerun_that_differs_ends_the_backward_by_name(kind: Any) -> None:
    model = model_of(unrepeatable)
    with attached(model, kind), pytest.raises(RerunMismatch) as caught:
        step(model)
    said = str(caught.value)
    assert "backward of units." in said and "never proven right" in said
    assert "Backward0 reads" in said and "float32 tensor" in said
    assert "`save`" in said


@each_rerun
def test_a_rerun_in_another_type_is_a_mismatch(kind: Any) -> None:
    dtype = torch.float64

    def body(unit: Any, x: Tensor) -> Tensor:
        return mlp(unit, x) * torch.ones(WIDTH, dtype=dtype)  # saved, of which autograd casts the gradient

    model = model_of(body).double()
    with attached(model, kind):
        result = model(BATCH.double()).pow(2).mean()
        dtype = torch.float32
        with raises(RerunMismatch, "units.1", "float64 tensor (64,)"):
            result.backward()


@pytest.mark.parametrize("kind", [*RERUNNING, "remake", "offload"], ids=str)
def test_what_is_right_is_proven_and_stays_as_it_is(kind: Any) -> None:
    wanted, before = step(model_of(mlp)), torch.get_rng_state()
    model = model_of(mlp)
    with attached(model, kind, sentinels="all") as session:
        torch.set_rng_state(before)
        for _ in range(3):
            assert all(map(torch.equal, step(model), wanted))  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), before)
    check = session.sentinels
    for unit in check.units.values():
        assert unit.checks >= 3 and unit.tensors >= 3 and not unit.unchecked
    assert check.passes == 3 and str(check.tensors) in str(check)


@pytest.mark.parametrize("kind", ["recompute", "remake", "offload", Segment(size=2)], ids=str)
@pytest.mark.parametrize("by", ["data", "numpy"])
def test_writes_after_saving_that_autograd_does_not_see(kind: Any, by: str) -> None:
    """By a name that dies with the forward: equal, or refused."""

    def body(unit: Any, x: Tensor) -> Tensor:
        h = torch.exp(unit.a(x) * 0.1)
        y = unit.b(h) * h
        if by == "data":
            h.data.mul_(0.5)
        else:
            h.detach().numpy()[:] = 1
        return y

    wanted, model = step(model_of(body)), model_of(body)
    with attached(model, kind):
        try:
            found = step(model)
        except AutockptError as error:
            assert isinstance(error, RerunMismatch)
        else:
            assert all(map(torch.equal, found, wanted))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["recompute", "offload", "remake", Segment(size=2)], ids=str)
def test_writes_to_an_output_while_it_lives(kind: Any) -> None:
    def body(unit: Any, x: Tensor) -> Tensor:
        return torch.exp(mlp(unit, x))

    def clamp(x: Tensor) -> None:
        x.data.clamp_(0.9, 1.1)

    model = model_of(body, clamp)
    with attached(model, kind), pytest.raises(RerunMismatch):
        step(model)


def test_what_goes_wrong_late_is_found_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "LONGEST", 5)
    wrong = False

    def body(unit: Any, x: Tensor) -> Tensor:
        return unrepeatable(unit, x) if wrong else mlp(unit, x)

    model = model_of(body)
    with attached(model, "recompute") as session:
        for _ in range(12):
            step(model)
        checks = [unit.checks for unit in session.sentinels.units.values()]
        assert all(3 <= n <= 5 for n in checks), "the first two, then one of six"
        wrong = True
        with raises(RerunMismatch):
            for _ in range(6):
                step(model)


def by_data(bias: Tensor) -> None:
    bias.data.add_(0.5)


def by_a_fused_step(bias: Tensor) -> None:
    bias.grad = torch.ones(WIDTH)
    torch.optim.Adam([bias], lr=0.5, fused=True).step()


# under `selective` products are kept, so nothing is made again from these weights
@pytest.mark.parametrize("kind", [*(kind for kind in RERUNNING if kind != "selective"), "remake"], ids=str)
@pytest.mark.parametrize("write", [by_data, by_a_fused_step])
def test_late_writes_to_weights_are_found_in_a_checked_call(write: Any, kind: Any) -> None:
    model = model_of(mlp)
    with attached(model, kind):
        for _ in range(3):  # the fourth call is checked
            step(model)
        loss = model(BATCH).pow(2).mean()
        for unit in model.units:  # type: ignore[union-attr]
            write(unit.a.bias)
        with pytest.raises(AutockptError, match=r"units\.[01]"):
            loss.backward()


def test_parameters_that_a_recomputation_changes() -> None:
    """No gradient shows it: an average that every forward moves on."""

    def body(unit: Any, x: Tensor) -> Tensor:
        unit.b.bias.data.add_(1e-3)
        return torch.tanh(unit.a(x))

    model = model_of(body)
    with attached(model, "recompute"), pytest.raises(AutockptError, match=r"bias|in place"):
        step(model)


def test_a_backward_that_fails_keeps_nothing_to_be_judged() -> None:
    model = model_of(mlp)
    model.units[0].a.weight.register_hook(lambda _: 1 / 0)  # type: ignore[union-attr]
    with attached(model, "recompute"), pytest.raises(ZeroDivisionError):
        step(model)
    gc.collect()
    assert not divergence._pending


def test_what_backward_does_not_read_is_no_mismatch() -> None:
    """The units that are wrong take no part in this backward."""
    model = model_of(mlp)
    model.units[0].body = unrepeatable
    with attached(model, "recompute"):
        (gradient,) = torch.autograd.grad(model(BATCH).sum(), model.units[1].b.bias)  # type: ignore[union-attr]
        assert gradient.isfinite().all()


def test_kernels_that_do_not_repeat_are_compared_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "repeats", lambda device: False)
    noise = 1e-5

    def body(unit: Any, x: Tensor) -> Tensor:
        return mlp(unit, x * (1 + noise * (recomputing() is not None)))

    model = model_of(body)
    with attached(model, "recompute", sentinels="all"):
        with pytest.warns(UserWarning, match="not bitwise deterministic"):
            step(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model)
        noise = 1.0
        with pytest.raises(RerunMismatch):
            step(model)


def test_other_kinds_of_tensors_are_said_to_be_unchecked() -> None:
    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch.eye(4).to_sparse())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * ctx.saved_tensors[0].to_dense().trace() / 4

    model = model_of(lambda unit, x: Sparse.apply(mlp(unit, x)))
    with attached(model, "recompute") as session:
        step(model)
    check = session.sentinels
    assert all([*unit.unchecked.values()] == [1] for unit in check.units.values())
    assert "1 × not checked: a tensor that is no plain one" in str(check)


@pytest.mark.parametrize(
    ("dtype", "shape", "dropout", "unwritten"),
    [
        (torch.int64, (), 0.0, True),  # the seed of memory-efficient attention, on the host
        (torch.int64, (), 0.1, False),
        (torch.uint64, (2,), 0.0, True),  # seed and offset of flash attention
        (torch.uint64, (2,), 0.1, False),
        (torch.uint64, (), 0.1, True),  # what it saves besides and nobody reads
        (torch.int32, (2,), 0.0, False),  # where the sequences of a packed batch begin
        (torch.float32, (2,), 0.0, False),
    ],
)
def test_seeds_of_attention_count_where_there_is_dropout(dtype, shape, dropout, unwritten) -> None:
    node = SimpleNamespace(name=lambda: "ScaledDotProductFlashAttentionBackward0", _saved_dropout_p=dropout)
    assert left_unwritten(node, torch.zeros(shape, dtype=dtype)) == unwritten


@pytest.mark.parametrize(("shape", "unwritten"), [((2, 4, 32), True), ((1, 40, 4, 8), False)])
def test_attention_sums_of_packed_sequences_end_with_each(shape: tuple[int, ...], unwritten: bool) -> None:
    node = SimpleNamespace(name=lambda: "EfficientAttentionBackward0", _saved_dropout_p=0.0)
    assert left_unwritten(node, torch.zeros(shape)) == unwritten


def ctc_loss(unit: Any, x: Tensor, vocabulary: int) -> Tensor:
    lengths, steps = torch.tensor([8, 3, 5, 1]), torch.tensor([12, 12, 9, 7])
    targets = torch.arange(32).view(4, 8) % 19 + 1
    guessed = unit.a(x[:, :12])[..., :vocabulary].log_softmax(-1).transpose(0, 1)
    return x + nn.functional.ctc_loss(guessed, targets, steps, lengths) + unit.b(x)


@pytest.mark.parametrize("kind", RERUNNING, ids=str)
@pytest.mark.parametrize(
    "body",
    [
        partial(ctc_loss, vocabulary=20),
        partial(ctc_loss, vocabulary=21),
        lambda unit, x: unit.b(nn.functional.rrelu(unit.a(x))),
    ],
    ids=["ctc loss", "another vocabulary", "slopes of rrelu"],
)
def test_what_kernels_leave_unwritten_is_no_mismatch(body: Any, kind: Any) -> None:
    runs = itertools.count(1)

    def in_other_memory(unit: Any, x: Tensor) -> Tensor:
        junk = [torch.full((4, 80, width), next(runs)) for width in (17, WIDTH) for _ in range(8)]
        del junk
        return body(unit, x)

    wanted, model = step(model_of(in_other_memory)), model_of(in_other_memory)
    with attached(model, kind, sentinels="all") as session:
        for _ in range(4):
            assert all(map(torch.equal, step(model), wanted))  # type: ignore[arg-type]
    unchecked = [unit.unchecked for unit in session.sentinels.units.values()]
    assert all(set(counts) == {"a tensor that its kernel need not write"} for counts in unchecked)


@pytest.mark.parametrize("kind", [*RERUNNING, "remake", "offload"], ids=str)
def test_running_statistics_written_after_saving_are_no_mismatch(kind: Any) -> None:
    def make() -> nn.Module:
        model = model_of(lambda unit, x: unit.norm(torch.tanh(unit.a(x))))
        for unit in model.units.children():  # a copy of them for each row, which is large enough to leave the device
            unit.norm = nn.InstanceNorm1d(80, affine=True, track_running_stats=True)
        return model

    assert_as_plain(make, on(UNITS, kind), lambda: BATCH.repeat(16, 1, 1), 3, sentinels="all")


def test_off_watches_nothing_and_copies_take_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCKPT_SENTINELS", "off")
    model = model_of(unrepeatable)
    with attached(model, "recompute") as session:
        step(model)
        assert session.sentinels.mode == "off" and "off" in str(session.sentinels)
    monkeypatch.setenv("AUTOCKPT_SENTINELS", "often")
    with raises(UsageError, "AUTOCKPT_SENTINELS", "often"):
        attached(model, "recompute")
    monkeypatch.delenv("AUTOCKPT_SENTINELS")
    model = model_of(unrepeatable)
    with attached(model, "recompute") as session:
        copied = copy.deepcopy(model)
        with pytest.raises(RerunMismatch):
            step(copied)
        assert not session.sentinels.passes
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        with pytest.raises(RerunMismatch):
            step(torch.load(buffer, weights_only=False))


@pytest.mark.parametrize("kind", ["recompute", "offload", "remake"])
def test_they_hold_no_more_than_a_number_per_tensor(kind: str) -> None:
    def kept(mode: Any) -> int:
        model = model_of(mlp)
        with attached(model, kind, sentinels=mode):
            step(model)
            return bytes_alive_after(lambda: model(BATCH))

    assert 0 < kept("all") - kept("off") <= 2 * 20 * 8


def test_calls_in_a_captured_graph_are_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = model_of(mlp)
    with attached(model, "offload") as session:
        step(model)
        assert "not checked: calls in a CUDA graph" in str(session.sentinels)
