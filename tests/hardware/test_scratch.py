"""Scratch that no rule tells is what a real call takes, and reaches the predicted peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.hardware.operators import Operator
from autockpt.hardware.scratch import WorkspaceTrials, is_measured, measured_bytes
from autockpt.hardware.signature import plain_signature
from autockpt.schema.graph import Graph
from autockpt.tracing import Tracer
from autockpt.workload import Step
from tests.hardware.test_workspaces import real_workspace
from tests.tracing.reference import Real

aten = torch.ops.aten
BF16 = torch.bfloat16
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN"),
]


@dataclass(eq=False)
class Call:
    trial: str
    flops: int = 0
    workspace: int = 7  # what a rule said


# what the rules of workspaces.py do not say: a backward that takes a hundred times its weights
def depthwise() -> tuple[Any, tuple[Any, ...]]:
    x, weight = torch.rand(4, 64, 2, 2).to(memory_format=torch.channels_last), torch.rand(64, 1, 7, 7)
    geometry = [1, 1], [3, 3], [1, 1], False, [0, 0], 64
    return aten.convolution_backward.default, (x, x, weight, [64], *geometry, [True] * 3)


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    a, b = torch.rand(96, 64).to(BF16), torch.rand(64, 128).to(BF16)
    q = torch.rand(2, 2, 80, 16).to(BF16)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return [
        depthwise(),
        (aten.mm.default, (a, b)),
        (aten.mm.default, (b.t(), a.t())),
        (backward, (out, q, q, q, out, lse, 0.0, False)),
    ]


@pytest.mark.parametrize("index", range(4))
def test_a_trial_takes_what_the_step_takes(index: int) -> None:
    func, args = calls()[index]
    assert is_measured(Operator(func), [args[0]])
    text = plain_signature(func, args)
    assert measured_bytes([text], torch.get_num_threads()) == {text: real_workspace(func, *args)}


def test_other_threads_take_a_process_of_their_own() -> None:
    text = plain_signature(*depthwise())
    threads = torch.get_num_threads() + 1
    here, there = measured_bytes([text], torch.get_num_threads()), measured_bytes([text], threads)
    assert there.keys() == here.keys() and there[text] > 0


def test_what_cannot_be_called_keeps_its_rule() -> None:
    good, bad = plain_signature(*depthwise()), "aten.mm.default(bf16[2,3], bf16[4,5])"
    found = measured_bytes([good, bad, "aten.nonsense.default(f32[1])"], torch.get_num_threads())
    assert list(found) == [good]


def test_large_ops_are_given_up_however_fast_the_machine() -> None:
    small = plain_signature(*depthwise())
    trials = WorkspaceTrials()
    product = "aten.mm.default(bf16[64,64], bf16[64,64])"
    wanted = [Call(small), Call(product, flops=10**12), Call("aten.mm.default(bf16[40000,40000], bf16[40000,1])")]
    for call in wanted:
        trials.add(call)
    trials.run(torch.get_num_threads())
    assert trials.given_up == set(wanted[1:])
    assert wanted[0].workspace != 7 and [c.workspace for c in wanted[1:]] == [7, 7]


def test_what_the_copies_of_resampling_take_is_measured() -> None:
    image = torch.rand(2, 8, 16, 16)
    last = image.to(memory_format=torch.channels_last)
    halves, where = aten.max_pool2d_with_indices.default(last, [2, 2], [2, 2])
    pooled: tuple[Any, ...] = (halves, last, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.upsample_nearest2d.default, (image, [32, 32], 2.0, 2.0)),
        (aten.upsample_bilinear2d.default, (last, [32, 32], False, 2.0, 2.0)),
        (aten.im2col.default, (image, [3, 3], [1, 1], [1, 1], [1, 1])),
        (aten.max_pool2d_with_indices_backward.default, pooled),
    ]
    for func, args in calls:
        assert is_measured(Operator(func), [args[0]])
        text = plain_signature(func, args)
        assert measured_bytes([text], torch.get_num_threads()) == {text: real_workspace(func, *args)}


def test_fp32_products_and_other_ops_are_not_tried() -> None:
    x = torch.rand(4, 4)
    assert not is_measured(Operator(aten.mm.default), [x])
    assert not is_measured(Operator(aten.relu.default), [x.to(BF16)])


def compared(model: nn.Module, batch: Tensor, dtype: torch.dtype | None = None) -> tuple[Graph, Real]:
    def step(m: nn.Module, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return m(b).float().square().mean()

    workload = Step(model, batch, loss=step, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    with Tracer.from_step(workload, fallback=False) as tracer:
        return tracer.trace(), Real(workload)


def test_the_peak_of_a_depthwise_network_is_that_of_its_real_step() -> None:
    layers = [nn.Sequential(nn.Conv2d(48, 48, 7, padding=3, groups=48), nn.GELU()) for _ in range(3)]
    batch = torch.rand(2, 48, 3, 3).to(memory_format=torch.channels_last)
    graph, real = compared(nn.Sequential(*layers).to(memory_format=torch.channels_last), batch)
    assert graph.source == "ghost" and not graph.notes
    assert graph.peak_bytes == real.peak_bytes


def test_the_peak_of_16_bit_products_is_that_of_the_real_step() -> None:
    graph, real = compared(nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))), torch.rand(64, 128), BF16)
    assert graph.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)


def test_a_network_too_large_to_try_says_so() -> None:
    layer = nn.Conv2d(512, 512, 3, padding=1)
    batch = torch.empty(64, 512, 40, 40)  # 200 MB that are never touched
    workload = Step(layer, batch, loss=lambda m, b: m(b).sum())
    with Tracer.from_step(workload, fallback=False) as tracer:
        graph = tracer.trace()
    assert any("not tried out" in note for note in graph.notes)
