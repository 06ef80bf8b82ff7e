from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autockpt.errors import GhostError
from autockpt.tracing.ghost import GhostMode
from autockpt.tracing.memory import GhostMemory


@pytest.fixture
def memory() -> GhostMemory:
    return GhostMemory()  # read-only: a kernel that runs ends this process


@pytest.fixture
def mode(memory: GhostMemory) -> Iterator[GhostMode]:
    made = GhostMode(memory)
    with made.recording():
        yield made


def ghost(mode: GhostMode, *size: int) -> Tensor:
    tensor = torch.empty(size, device="meta")
    return mode.over(mode.log.ghost(tensor.untyped_storage().nbytes(), -1)[0], tensor)


@pytest.mark.slow
def test_large_results_are_ghosts_and_take_no_memory(mode: GhostMode, memory: GhostMemory) -> None:
    x = torch.zeros(1 << 20, 256)
    y = (x @ torch.zeros(256, 256)).relu_()
    assert memory.owns(x) and memory.owns(y)
    assert y.shape == (1 << 20, 256)


def test_small_tensors_keep_their_values(mode: GhostMode, memory: GhostMemory) -> None:
    mask = torch.ones(4, 32, dtype=torch.bool)
    mask[0, 5:] = False
    assert not memory.owns(mask)
    assert not mask.all()
    assert mask.sum().item() == 4 * 32 - 27
    assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]


def test_routing_is_balanced_and_noted(mode: GhostMode) -> None:
    scores = ghost(mode, 60, 6)
    values, experts = scores.topk(2)
    counts = torch.bincount(experts.flatten(), minlength=6)
    assert counts.tolist() == [20] * 6
    assert all(len(set(row)) == 2 for row in experts.tolist())
    assert scores.argmax(-1).bincount().tolist() == [10] * 6
    assert scores.sort(-1).indices[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert any("balanced" in note for note in mode.notes)
    assert values.shape == (60, 2)


def test_floats_are_assumed_and_noted_others_refused(mode: GhostMode) -> None:
    x = ghost(mode, 8)
    assert x.sum().item() == 1.0
    assert any("1.0" in note for note in mode.notes)
    for ask in (
        lambda: bool(x.isnan().any()),
        lambda: x.long().sum().item(),
        lambda: torch.equal(x, x),
        lambda: x.long().tolist(),
    ):
        with pytest.raises(GhostError) as caught:
            ask()
        assert "takes a real step to be recorded" in caught.value.remedy


def test_data_dependent_shapes_are_refused(mode: GhostMode) -> None:
    x = ghost(mode, 8, 8)
    with pytest.raises(GhostError):
        x[x > 0]


def test_masks_whose_values_are_known_select_as_many_as_they_do(mode: GhostMode) -> None:
    x = ghost(mode, 8, 8)
    for count in (5, 2):  # the same signature, other values
        mask = torch.arange(8) < count
        assert x[mask].shape == (count, 8)
        assert x[:, mask].shape == (8, count)
    assert x[mask, mask].shape == (2,)


def test_tensors_without_memory_take_none(mode: GhostMode) -> None:
    shape = torch.empty(1 << 24, device="meta")
    assert shape.is_meta and not mode.ops[-1].outputs
