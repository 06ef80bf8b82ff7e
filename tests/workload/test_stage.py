"""A stage of a pipeline by itself runs its micro-batches in the schedule's order, with gradients for its neighbours."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import UsageError, WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build


def stage(batch: Any = None, **more: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    return Step(model, torch.randn(4, 8, requires_grad=True) if batch is None else batch, **more)


@pytest.mark.parametrize(
    ("in_flight", "micro_batches", "order"),
    [(1, 3, "fbfbfb"), (2, 4, "ffbfbfbb"), (3, 3, "fffbbb"), (4, 1, "ffffbbbb")],
)
def test_micro_batches_run_in_the_schedules_order(in_flight: int, micro_batches: int, order: str) -> None:
    seen: list[str] = []
    step = stage(in_flight=in_flight, accumulate=micro_batches)
    step.cycle(lambda phase: seen.append(phase[0]))
    assert "".join(seen) == order + "o"
    assert step.settings["in_flight"] == in_flight


@pytest.mark.parametrize("last", [True, False])
def test_gradients_are_those_of_a_hand_written_loop(last: bool) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    step = stage(in_flight=2, accumulate=3, loss=loss if last else None)
    model, told = copy.deepcopy(step.model), list[Tensor]()
    step.optimizer = torch.optim.SGD(step.model.parameters(), lr=0.1)
    step.cycle(report=told.append)
    received = step.batch.detach().clone().requires_grad_()
    for _ in range(3):
        received.grad = None
        if last:
            (loss(model, received) / 3).backward()
        else:
            output = model(received)
            output.backward(torch.ones_like(output))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for mine, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    sent = [tensor for tensor in told if tensor.shape == received.shape]
    assert len(sent) == 3
    assert all(torch.equal(gradient, received.grad) for gradient in sent)
    assert step.batch.grad is None


def test_what_cannot_be_a_stage_is_refused() -> None:
    with pytest.raises(WorkloadError):
        stage(in_flight=0)
    with pytest.raises(WorkloadError):
        stage(in_flight=2, full_step=print, snapshot=([],))
    with pytest.raises(WorkloadError):
        stage(in_flight=1, loss=lambda model, batch: model(batch).detach()).cycle()


@pytest.mark.parametrize("packed", [True, False])
def test_stages_of_a_job_are_together_the_whole_model(packed: bool) -> None:
    spec = WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=16, accumulate=4, packed=packed)
    whole = build(spec)
    stages = [build(spec.model_copy(update={"stage": f"{i}/3"})) for i in range(3)]
    hidden = stages[0].forward(stages[0].batch)
    assert torch.equal(stages[2].batch["labels"], whole.batch["labels"])
    for stage in stages[1:]:
        hidden = stage.forward({**stage.batch, "inputs_embeds": hidden})
    assert torch.equal(hidden, whole.forward(whole.batch))
    assert [stage.in_flight for stage in stages] == [3, 2, 1]
    names = [{name for name, _ in stage.model.named_parameters()} for stage in stages]
    assert set().union(*names) == {name for name, _ in whole.model.named_parameters()}
    assert sum(map(len, names)) == len(set().union(*names))


def test_gpipe_keeps_all_micro_batches_in_flight() -> None:
    assert build(WorkloadSpec(model="llama-tiny", accumulate=6, stage="1/2 gpipe")).in_flight == 6


def test_models_and_schedules_that_cannot_be_cut_are_refused() -> None:
    for stage in ("2/2", "0/2 zbv", "0"):
        with pytest.raises(ValueError):
            WorkloadSpec(model="llama-tiny", stage=stage)
    for model, stage in (("gpt2-tiny", "0/2"), ("llama-tiny", "0/99"), ("llama-tiny", "0/3,3")):
        with pytest.raises(UsageError, match=f"{stage}|no plan"):
            build(WorkloadSpec(model=model, stage=stage))
