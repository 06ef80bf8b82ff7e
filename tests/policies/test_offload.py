"""What only moving saved tensors away and back can get wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autockpt.checkpointing.offloaded import SMALL_BYTES
from autockpt.devices import disk
from autockpt.devices.disk import CpuTransport
from autockpt.errors import ConflictError, HostBudgetExceeded
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, Offload, RecomputeOffload
from tests.errors import raises
from tests.policies.deferred import DeferredDisk, DeferredTransport, always
from tests.policies.zoo import CASES, Row, Tally, assert_equal, bytes_alive_after, on, plain, train, trained

N = SMALL_BYTES // 4  # this many fp32 numbers are just large enough to be moved


class Unit(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(N) + 0.5)
        self.body = body

    def forward(self, *args: Any) -> Tensor:
        return self.body(self, *args)


def model_of(body: Callable[..., Tensor], n: int = 3) -> nn.Module:
    return Row(lambda: Unit(body), n)


def numbers() -> Tensor:
    return torch.rand(N)


def run(
    body: Callable[..., Tensor], plan: dict[str, Any], n: int = 3, steps: int = 2, **more: Any
) -> dict[str, Tensor]:
    return trained(lambda: model_of(body, n), plan, numbers, steps, **more)


def offloaded(n: int = 3) -> dict[str, Choice]:
    return on([f"units.{i}" for i in range(n)], OFFLOAD)


class SaveViews(torch.autograd.Function):
    """Saves many views of one storage and hands back what it reads from them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = x.detach().sin().view(2, -1)
        ctx.save_for_backward(
            whole,
            whole,
            whole.t(),
            whole[1, 5:],
            whole[0, :1].expand(whole.shape[1]),
            whole[:, ::3],
            whole.view(torch.int32),
            whole.flatten()[7:-9].unfold(0, 4, 2),
        )
        return whole.flatten() + 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        saved = ctx.saved_tensors
        layouts = [(t.size(), t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes()) for t in saved]
        SaveViews.seen = layouts, {t.untyped_storage().data_ptr() for t in saved}
        return gradient * float(sum(t.double().sum() for t in saved if t.is_floating_point()))

    seen: Any = None


@pytest.mark.slow
def test_all_views_of_a_storage_come_back_from_one_copy():
    def body(unit, x):
        return SaveViews.apply(x) * unit.weight

    wanted = run(body, {}, 1, 1)
    layouts, transport = SaveViews.seen[0], DeferredTransport()
    assert_equal(run(body, offloaded(1), 1, 1, transport=always(transport)), wanted)
    assert SaveViews.seen[0] == layouts
    assert len(SaveViews.seen[1]) == 1
    assert transport.queues.sent == transport.queues.fetched == 2 * 4 * N  # and the product's factor


def sent_by(body: Callable[..., Tensor], *more: Any) -> int:
    """Bytes that one unit sends."""
    model, transport = model_of(body, n=1), DeferredTransport()
    with attach(model, offloaded(1), transport=always(transport)):
        model(numbers().requires_grad_(), *more)
    return transport.queues.sent


def test_what_is_moved_and_what_is_not():
    big = 4 * N
    assert sent_by(lambda unit, x: x.sigmoid() * unit.weight) == big  # saved twice, moved once; the weight stays
    assert sent_by(lambda unit, x: (x * unit.weight).sin().cos()) == 3 * big  # the hidden state, product, sine
    assert sent_by(lambda unit, x: (x.view(2, -1) * unit.weight.view(2, -1)).sin()) == 2 * big  # views of weights stay
    assert sent_by(lambda unit, x: (unit.weight[:9] * x[:9]).sin().cos()) == big  # of small tensors only the input's
    mask = torch.rand(N)
    assert sent_by(lambda unit, x, m: x * unit.weight * m, mask) == big  # not the mask
    assert sent_by(lambda unit, x, m: (x * m.view(2, -1).flatten()).sin(), mask) == big  # nor a view of it


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_copies_of_trained_weights_stay(frozen):
    model, transport = (
        nn.Sequential(nn.Sequential(nn.Linear(128, 128), nn.Sigmoid()), nn.Identity()),
        DeferredTransport(),
    )
    model.requires_grad_(not frozen)
    with attach(model, {"0": OFFLOAD}, transport=always(transport)), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.rand(256, 128).requires_grad_())
    besides = 128 if frozen else 256  # the frozen weight; the input, saved for the gradient of a trained one
    assert transport.queues.sent == (256 + besides) * 128 * 2  # the sigmoid, in 16 bits all of them
    assert SMALL_BYTES <= 128 * 128 * 2


def test_while_a_graph_is_captured_it_is_refused(monkeypatch):
    model = model_of(lambda unit, x: (x * unit.weight).sin(), n=1)
    with attach(model, offloaded(1), transport=always(DeferredTransport())):
        model(torch.rand(N).requires_grad_())  # as a capture is warmed up
        monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
        with raises(ConflictError, "units.0"):
            model(torch.rand(N).requires_grad_())


def test_nothing_leaks_without_backward():
    model, transport = model_of(lambda unit, x: (x * unit.weight).sin().exp()), DeferredTransport()
    with attach(model, offloaded(), transport=always(transport)):
        for _ in range(3):
            model(numbers())
        out = model(numbers())
        assert transport.pieces_in_use() > 0
        del out
        assert transport.pieces_in_use() == 0  # by reference count alone
        held = transport.pool.held_bytes
        for _ in range(5):
            model(numbers()).sum().backward()
        assert transport.pool.held_bytes == held and transport.pieces_in_use() == 0


def test_memory_is_given_back_while_the_forward_runs():
    """Where copies run alongside compute, storages stay until the next unit has run; elsewhere they go at once."""

    def body(unit, x):
        return (x * unit.weight).sin().exp().cos()

    def kept(n: int, transport: Any) -> int:
        model = model_of(body, n=n)
        with attach(model, offloaded(n), transport=always(transport)):
            model(numbers())
            return bytes_alive_after(lambda: model(numbers()))

    for make in (CpuTransport, DeferredTransport):
        assert kept(8, make()) <= kept(2, make()) + 1024


class Log(DeferredTransport):
    """Notes when handles are settled and fetched; ``now`` says where the step is."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.lines = "", []
        inner = self.queues
        wait, copy = inner.wait, inner.copy

        def waited(event):
            if not event.done:
                self.lines.append(f"{self.now}: wait")
            wait(event)

        def fetched(direction, target, source, after):
            if direction == "in":
                self.lines.append(f"{self.now}: fetch")
            return copy(direction, target, source, after)

        inner.wait, inner.copy = waited, fetched


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: Log, unit: int) -> Tensor:
        ctx.log, ctx.unit = log, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.log.now = f"before backward of {ctx.unit}"
        return gradients[0], None, None


def logged(*choices: Choice) -> list[str]:
    """When one step under these choices waits for copies, and when it starts to bring them back."""
    log = Log()

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(Unit(lambda unit, x: x * unit.weight) for _ in choices)

        def forward(self, x: Tensor) -> Tensor:
            for i, unit in enumerate(self.units):
                x = unit(x)
                log.now = f"forward of {i} done"
                x = Mark.apply(x, log, i)
            return x

    model = Marked()
    with attach(model, {f"units.{i}": choice for i, choice in enumerate(choices)}, transport=always(log)):
        model(torch.rand(N).requires_grad_()).sum().backward()
    return log.lines


@pytest.mark.parametrize(
    ("choices", "waits", "backward"),
    [
        # 0 is settled when 1 has ended and 1 when 2 has: the log's clock is set after each forward; 1 is fetched when
        # 2's backward begins and 0 when 1's does: one ahead; both arrive when they are needed
        ((OFFLOAD, OFFLOAD, RECOMPUTE, SAVE), (0, 1), ("2: fetch", "1: fetch", "1: wait", "0: wait")),
        # a window gives copies the forwards of several units: 0 is due at the end of 3, and 2 at the end of 4; as early
        # as that in backward, too, and 0 when 2 begins at the latest
        (
            (Offload(window=3), SAVE, Offload(window=2), SAVE, RECOMPUTE, SAVE),
            (2, 3),
            ("4: fetch", "3: fetch", "2: wait", "0: wait"),
        ),
    ],
)
def test_when_copies_are_waited_for_and_started(choices, waits, backward):
    lines = [f"forward of {unit} done: wait" for unit in waits]
    assert logged(*choices) == [*lines, *(f"before backward of {line}" for line in backward)]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.sampled_from([SAVE, RECOMPUTE, OFFLOAD, *(Offload(window=w) for w in (2, 3, 7)), RecomputeOffload()]),
        min_size=5,
        max_size=7,
    )
)
def test_gradients_are_equal_with_any_windows(choices):
    def body(unit, x):
        return (x * unit.weight).sin().exp() * x

    named, n = {f"units.{i}": choice for i, choice in enumerate(choices)}, len(choices)
    assert_equal(run(body, named, n, transport=always(DeferredTransport())), run(body, {}, n))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("make", [CpuTransport, DeferredTransport])
def test_a_second_backward_over_the_same_graph(make, n):
    def body(unit, x):
        return (x * unit.weight).sin() * x  # two storages in one node, one of them used twice

    model, transport = model_of(body, n=n), make()
    with attach(model, offloaded(n), transport=always(transport)):
        loss = model(numbers().requires_grad_()).sum()
        for turn in (1, 2):
            for parameter in model.parameters():
                parameter.grad = None
            left = bytes_alive_after(lambda: loss.backward(retain_graph=True))
            assert left <= (n + 1) * 4 * N + 1024  # the gradients: whatever came back was let go again
            if isinstance(transport, DeferredTransport):
                assert transport.queues.fetched == turn * transport.queues.sent


# --- tiers and the host budget


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "cnn"])
def test_gradients_are_bit_equal_with_both_tiers_in_one_model(name, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "PART_BYTES", 8192)
    case = CASES[name]
    model = case.make()
    tiers = (Offload(tier="disk"), RecomputeOffload(tier="disk"), OFFLOAD, RecomputeOffload())
    choices = {unit: tiers[i % 4] for i, unit in enumerate(case.units(model))}
    made: dict[str, Any] = {"cpu": DeferredTransport(), "disk": DeferredDisk(tmp_path)}
    with attach(model, choices, transport=lambda device, tier: made[tier]):
        assert_equal(train(model, case), plain(case))
    assert all(transport.queues.sent == transport.queues.fetched > 0 for transport in made.values())
    assert all(transport.pieces_in_use() == 0 for transport in made.values())


def test_a_rerun_happens_once_with_its_input_fetched():
    counted, transport = Tally(), DeferredTransport()

    def body(unit: Any, x: Tensor) -> Tensor:
        counted.calls += 1
        return (x * unit.weight).sin() * x

    model = model_of(body)
    with attach(model, dict.fromkeys(offloaded(), RecomputeOffload()), transport=always(transport)):
        loss = model(torch.rand(N).requires_grad_()).sum()
        assert (counted.calls, transport.queues.sent, transport.queues.fetched) == (3, 3 * 4 * N, 0)
        loss.backward()
    assert (counted.calls, transport.queues.sent, transport.queues.fetched) == (6, 3 * 4 * N, 3 * 4 * N)


def test_the_host_budget_is_a_bound_of_the_step():
    body, needed = lambda unit, x: (x * unit.weight).sin(), 2 * 3 * 4 * N  # two storages of each unit
    with attach(model := model_of(body), offloaded(), host_budget=needed) as session:
        model(numbers().requires_grad_()).sum().backward()
        assert session.host_bytes == needed
    wanted = run(body, {})
    assert_equal(run(body, offloaded(), host_budget=needed), wanted)
    with attach(model, offloaded(), host_budget=needed - 4096), pytest.raises(HostBudgetExceeded):
        model(numbers())
    with attach(model, {"units.0": OFFLOAD}, host_budget=needed):  # nothing of the failed step is left
        model(numbers()).sum().backward()
