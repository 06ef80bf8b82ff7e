"""What is noted of a forward: values by what lies in memory between two writes, and the ops that made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from autockpt.checkpointing.op_recorder import OpRecorder, Value
from autockpt.checkpointing.op_table import kind_of
from tests.checkpointing.recorded import Watching


def saved_by(function: Callable[[Tensor, Tensor], Any], **options: Any) -> tuple[OpRecorder, list[Value | None]]:
    """The record of a function of an input and a weight, and the values of what autograd saved."""
    x, weight = torch.ones(8, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    recorder = OpRecorder([x], [weight], options.pop("keeps", lambda _: False), **options)

    def pack(tensor: Tensor) -> Tensor:
        recorder.save(tensor)
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor), Watching(recorder):
        function(x, weight)
    return recorder, [saved.value for saved in recorder.saved]


@pytest.mark.parametrize("keeps", [True, False])
def test_products_run_again_unless_they_are_kept(keeps: bool) -> None:
    _, values = saved_by(lambda x, w: (x @ w).exp(), keeps=lambda _: keeps)
    product = values[-1]
    assert product is not None and product.op is not None
    assert (product.op.reads[0].op is None) == keeps


def test_a_write_ends_a_value() -> None:
    def writes(x: Tensor, w: Tensor) -> Tensor:
        made = x.exp()
        return made.detach().mul_(2) * w[0]

    _, (before, after, *_) = saved_by(writes)
    assert before is not None and before.overwritten
    assert after is not None and after is not before and not after.overwritten
    assert after.op is not None and after.op.reads == [before], "it is made again with what it was written over"


@pytest.mark.parametrize("whole", [True, False])
def test_blank_memory_is_made_again_once_all_of_it_is_written(whole: bool) -> None:
    """As keys of latent attention are, from a part of each head's and one of all heads."""

    def joined(x: Tensor, w: Tensor) -> Tensor:
        made = x.new_empty(8, 8)
        made[:, :4].copy_(x.exp())
        if whole:
            made[:, 4:].copy_(x.sin())
        return made.cos()

    value = saved_by(joined)[1][-1]
    assert value is not None and value.op is not None and value.can_be_made == whole


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x * x.sum().item(),
        lambda x, w: x[x > 0],
        lambda x, w: x[torch.nonzero(x[:, 0])],
        lambda x, w: torch.masked_select(x, x > 0),
    ],
)
def test_forwards_that_go_by_values_are_dynamic(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert saved_by(function)[0].is_dynamic
    assert not saved_by(lambda x, w: x[[1, 2]].exp())[0].is_dynamic


def test_writes_of_ops_that_are_not_pytorchs_own_do_not_run_again() -> None:
    library = torch.library.Library("autockpt_test", "FRAGMENT")
    library.define("twice_(Tensor(a!) self) -> ()", tags=torch.Tag.pointwise)
    assert kind_of(torch.ops.autockpt_test.twice_.default) == "writes"
    assert kind_of(torch.ops.aten.mul_.Tensor) == "writes again"


def test_an_op_under_switches_of_its_own_does_not_run_again() -> None:
    def switches(x: Tensor, w: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return x.exp()

    _, (value,) = saved_by(switches)
    assert value is not None and value.op is None


@pytest.mark.parametrize("backend", [torch.backends.cudnn, torch.backends.mkldnn])
def test_a_product_under_flags_of_its_own_does_not_run_again(backend: Any) -> None:
    def flags(x: Tensor, w: Tensor) -> Tensor:
        with backend.flags(enabled=False):
            return (x @ w).exp()

    result = saved_by(flags)[1][-1]
    assert result is not None and result.op is not None and result.op.reads[0].op is None


def test_where_ops_are_handed_on_in_part_versions_show_writes() -> None:
    x = torch.ones(8)
    recorder = OpRecorder([x], [], lambda _: False, everywhere=False)
    recorder.save(x)
    x.mul_(2)
    recorder.save(x)
    first, second = (saved.value for saved in recorder.saved)
    assert first is not None and second is not None and first is not second
    assert first.given == "input" and first.overwritten and second.foreign
