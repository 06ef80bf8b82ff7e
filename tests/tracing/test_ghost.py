from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autockpt.errors import GhostError
from autockpt.tracing.ghost import GhostMode
from autockpt.tracing.memory import GhostMemory


@pytest.fixture
def memory() -> GhostMemory:
    return GhostMemory(writable=True)


@pytest.fixture
def mode(memory: GhostMemory) -> Iterator[GhostMode]:
    made = GhostMode(memory)
    with made.recording():
        yield made


def ghost(mode: GhostMode, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.empty(size, dtype=dtype, device="meta")
    return mode.over(mode.log.ghost(tensor.untyped_storage().nbytes(), -1)[0], tensor)


@pytest.mark.slow
def test_large_results_are_ghosts_and_take_no_memory(mode: GhostMode, memory: GhostMemory) -> None:
    x = torch.zeros(1 << 20, 256)
    y = (x @ torch.zeros(256, 256)).relu_()
    assert memory.owns(x) and memory.owns(y)
    assert y.shape == (1 << 20, 256)
    assert memory.touched_bytes() in (0, None)


def test_small_tensors_keep_their_values(mode: GhostMode, memory: GhostMemory) -> None:
    mask = torch.ones(4, 32, dtype=torch.bool)
    mask[0, 5:] = False
    assert not memory.owns(mask)
    assert not mask.all()
    assert mask.sum().item() == 4 * 32 - 27
    assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]


def test_views_of_ghosts_share_their_storage(mode: GhostMode) -> None:
    x = ghost(mode, 64, 64)
    assert mode.log.find(x.t()[3:].view(61, 8, 8)) == mode.log.find(x)


def test_writes_to_ghosts_return_the_ghost(mode: GhostMode, memory: GhostMemory) -> None:
    x = ghost(mode, 64, 64)
    assert x.add_(1).mul_(2).zero_() is x
    torch.ops.aten._foreach_add_.Scalar([x, x], 1.0)
    out = torch.empty_like(x)
    assert torch.add(x, x, out=out) is out
    assert memory.touched_bytes() in (0, None)


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
        with pytest.raises(GhostError, match=r"value|cannot be ghost-run") as caught:
            ask()
        assert "takes a real step to be recorded" in caught.value.remedy


def test_data_dependent_shapes_are_refused(mode: GhostMode) -> None:
    x = ghost(mode, 8, 8)
    with pytest.raises(GhostError, match="nonzero"):
        x[x > 0]


def test_masks_whose_values_are_known_select_as_many_as_they_do(mode: GhostMode) -> None:
    x = ghost(mode, 8, 8)
    for count in (5, 2):  # the same signature, other values
        mask = torch.arange(8) < count
        assert x[mask].shape == (count, 8)
        assert x[:, mask].shape == (8, count)
    assert x[mask, mask].shape == (2,)


def test_the_longest_target_decides_what_ctc_keeps(mode: GhostMode) -> None:
    scores = ghost(mode, 12, 3, 6)
    targets = torch.ones(3, 5, dtype=torch.long)
    for longest in (5, 3):
        lengths = torch.tensor([1, longest, 2]), torch.full((3,), 12)
        loss, variables = torch.ops.aten._ctc_loss.Tensor(scores, targets, lengths[1], lengths[0])
        assert loss.shape == (3,) and variables.shape == (3, 12, 2 * longest + 1)
    gradient = torch.ops.aten._ctc_loss_backward.Tensor(
        loss, scores, targets, lengths[1], lengths[0], loss, variables, 0
    )
    assert gradient.stride() == scores.stride() and mode.log.find(gradient) is not None
    with pytest.raises(GhostError, match="values that only exist"):
        torch.ops.aten._ctc_loss.Tensor(scores, targets, lengths[1], (ghost(mode, 3) * 2).long())


def test_tensors_that_have_no_ghosts_are_refused(mode: GhostMode) -> None:
    with pytest.raises(GhostError, match="no ghosts"):
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (4,), check_invariants=False).coalesce()


def test_accelerators_named_in_calls_are_overlooked(mode: GhostMode) -> None:
    x = ghost(mode, 8)
    cuda = torch.device("cuda")
    assert torch.ops.aten._to_copy.default(x, dtype=torch.bfloat16, device=cuda).device.type == "cpu"
    assert torch.ops.aten.zeros.default([1 << 30], device=cuda, pin_memory=True).device.type == "cpu"


def test_shapes_are_inferred_once_per_signature(mode: GhostMode, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ghost(mode, 8, 8)
    assert (x @ x).shape == (8, 8)
    monkeypatch.setattr(mode._shapes, "infer", lambda *_: pytest.fail("inferred again"))
    (x @ x).mul_(0.5).mul_(0.25)


def test_backward_through_ghosts(mode: GhostMode, memory: GhostMemory) -> None:
    weight = torch.nn.Parameter(ghost(mode, 64, 64))
    ((torch.ones(4, 64) @ weight).relu() @ weight).sum().backward()
    assert weight.grad is not None and memory.owns(weight.grad)
    assert mode.log.find(weight.grad) in mode.gradients
    assert memory.touched_bytes() in (0, None)
