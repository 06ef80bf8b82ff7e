"""The stand-in itself: bits as on the CPU under every schedule, and what is forgotten is found."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policies.heads import small_llama

standin = torch.get_device_module("standin")
SCHEDULES = ("eager", "lazy", "random:1", "random:2", "compute-late", "copies-late")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture
def races() -> Any:
    """For tests that make some: the function that gives them and forgets them."""

    def found() -> list[str]:
        standin.synchronize()
        races = standin.races()
        standin.extension.clear_races()
        return races

    return found


@pytest.fixture
def lazy() -> None:
    standin.set_schedule("lazy")


def _trained(device: str) -> dict[str, Tensor]:
    model = small_llama()().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(1, 64, (4, 32), generator=torch.Generator().manual_seed(3)).to(device)
    for _ in range(3):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def on_the_cpu() -> dict[str, Tensor]:
    return _trained("cpu")


@each_schedule
def test_training_has_the_bits_of_the_cpu(schedule, on_the_cpu):
    standin.set_schedule(schedule)
    got = _trained("standin")
    assert not [name for name in got if not torch.equal(got[name], on_the_cpu[name])]


def test_nothing_runs_before_somebody_waits(lazy):
    x = torch.ones(8, device="standin")
    event = torch.Event("standin")
    y = x + 1
    event.record()
    assert not event.query()
    assert y.sum().item() == 16  # which waits
    assert event.query()
    assert not {name for name in standin.extension.counts() if name.startswith("waited") and "equal" not in name}


@each_schedule
def test_streams_keep_their_own_order_and_events_join_them(schedule):
    standin.set_schedule(schedule)
    side = torch.Stream("standin")
    x = torch.zeros(1 << 12, device="standin")
    for _ in range(5):
        x += 1
        side.wait_event(torch.accelerator.current_stream().record_event())
        with side:
            x *= 2
            done = side.record_event()
        torch.accelerator.current_stream().wait_event(done)
    assert x[0].item() == 62


def _to_pinned(source: Tensor, wait: bool) -> tuple[Tensor, Any, Any]:
    side = torch.Stream("standin")
    there = torch.empty(source.shape, pin_memory=True)
    if wait:
        side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        there.copy_(source, non_blocking=True)
    return there, side.record_event(), side


@pytest.mark.parametrize("wait", (True, False))
@each_schedule
def test_a_copy_that_does_not_wait_for_its_source_is_found(schedule, wait, races):
    standin.set_schedule(schedule)
    x = torch.ones(4096, device="standin") * 3
    there, done, _ = _to_pinned(x, wait)
    done.synchronize()
    if wait:
        assert torch.equal(there, torch.full((4096,), 3.0))
        assert not races()
    else:
        assert any("a copy to the host" in race and "aten::mul" in race for race in races())


@pytest.mark.parametrize("told", (True, False))
@each_schedule
def test_memory_freed_while_another_stream_reads_it_is_found(schedule, told, races):
    standin.set_schedule(schedule)
    x = torch.ones(4096, device="standin") * 3
    there, done, side = _to_pinned(x, True)
    if told:
        x.record_stream(side)
    del x
    again = torch.zeros(4096, device="standin")
    done.synchronize()
    if told:
        assert torch.equal(there, torch.full((4096,), 3.0))
        assert not races()
    else:
        assert any("a free" in race for race in races())
    del again


def test_what_was_freed_is_poisoned_in_order(lazy):
    x = torch.ones(4096, device="standin")
    address = x.data_ptr()
    y = x + 1  # queued before the free
    del x
    again = torch.empty(4096, device="standin")
    assert again.data_ptr() == address
    assert y[0].item() == 2
    assert torch.isnan(again).all().item()
    other = torch.Stream("standin")
    del again
    with other:
        assert torch.empty(4096, device="standin").data_ptr() != address


def test_the_host_reading_pinned_memory_too_early_is_found(lazy, races):
    x = torch.ones(4096, device="standin")
    there, done, _ = _to_pinned(x, True)
    standin.extension.host_touches(there.data_ptr(), there.nbytes, False)
    assert any("the host reads what a copy to the host" in race for race in races())
    done.synchronize()
    standin.extension.host_touches(there.data_ptr(), there.nbytes, False)
    assert not races()
