import pytest
import torch
from torch import nn

from autockpt.verification import (
    GradientCheck,
    Observation,
    Reference,
    deterministically,
    judge,
    observe,
    observe_reference,
)


def forward_backward(model: nn.Module, x: torch.Tensor):
    def run(between):
        loss = model(x).pow(2).sum()
        between()
        loss.backward()
        return loss.detach()

    return run


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2, bias=False))


def test_an_observation_holds_everything_and_changes_nothing(model):
    x = torch.randn(8, 4)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    seen = observe(model, forward_backward(model, x), steps=2)
    assert set(seen.digests) == {
        f"step {i}: {what}"
        for i in (1, 2)
        for what in (
            "loss",
            "random state after forward",
            "random state after backward",
            *(f"buffer {n}" for n, _ in model.named_buffers()),
            *(f"gradient {n}" for n, _ in model.named_parameters()),
        )
    }
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())
    assert Observation.model_validate_json(seen.model_dump_json()) == seen
    assert not seen.differences(observe(model, forward_backward(model, x), steps=2))


def test_accelerator_random_numbers_are_seen_and_restored(model, accelerator):
    accelerator.opened = True
    x = torch.randn(8, 4)

    def drawing(between):
        loss = forward_backward(model, x)(between)
        accelerator.states[1].add_(1)  # as dropout there does
        return loss

    seen = observe(model, drawing, steps=1)
    assert [int(state[0]) for state in accelerator.states] == [0, 1]
    accelerator.opened = False  # nothing is read where nothing was opened
    assert observe(model, drawing, steps=1).differences(seen) == [
        "step 1: random state after forward",
        "step 1: random state after backward",
    ]


def test_the_last_bit_of_one_gradient_is_a_difference(model):
    x = torch.randn(8, 4)
    first = observe(model, forward_backward(model, x))

    def nudged(between):
        loss = forward_backward(model, x)(between)
        weight = model[3].weight.grad
        weight.view(torch.int32)[0, 0] ^= 1
        return loss

    second = observe(model, nudged)
    assert first.differences(second) == ["step 1: gradient 3.weight", "step 2: gradient 3.weight"]
    assert 0 <= first.largest_deviation(second) < 1e-5
    result = judge(Reference(first, first, deterministic=False), second)
    assert not result.equal
    assert result.describe().startswith(f"2 of {len(first.digests)} values differ from plain training")


class Varying(nn.Module):
    """Gives other bits from call to call, unless deterministic algorithms are asked for."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.always, self.calls = always, 0

    def forward(self, x):
        self.calls += 1
        varies = self.always or not torch.are_deterministic_algorithms_enabled()
        return self.linear(x) * (1 + 1e-6 * self.calls * varies)


def judged(model: nn.Module) -> GradientCheck:
    step = forward_backward(model, torch.randn(3, 4))

    def run(deterministic: bool) -> Observation:
        return deterministically(lambda: observe(model, step)) if deterministic else observe(model, step)

    reference = observe_reference(run)
    return judge(reference, run(reference.deterministic))


@pytest.mark.parametrize(
    ("always", "said"), [(False, "under deterministic algorithms"), (True, "does not repeat itself")]
)
def test_a_reference_that_varies_is_repeated_deterministically(always: bool, said: str):
    result = judged(Varying(always))
    assert result.equal and result.deterministic and result.repeatable is not always
    assert said in result.describe()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_plan_that_deviates_more_than_the_reference_is_found():
    first = Observation(digests={"g": "a"}, norms={"g": 1.0})
    second = Observation(digests={"g": "b"}, norms={"g": 1.0 + 1e-7})
    wrong = Observation(digests={"g": "c"}, norms={"g": 1.1})
    assert judge(Reference(first, second, deterministic=True), second).equal
    assert not judge(Reference(first, second, deterministic=True), wrong).equal


def test_accelerators_are_checked_strictly_first(accelerator):
    accelerator.opened = True
    modes: list[bool] = []

    def run(possible: bool) -> str:
        modes.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if not possible and not modes[-1]:
            raise RuntimeError("histc does not have a deterministic implementation")
        return "done"

    assert deterministically(lambda: run(True)) == "done"
    assert modes == [False]
    assert deterministically(lambda: run(False)) == "done"
    assert modes == [False, False, True]
    with pytest.raises(RuntimeError, match="shapes"):
        deterministically(lambda: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    assert not torch.are_deterministic_algorithms_enabled()
