"""Adaptive training by an allocator's own counters, under a limit that is real."""

import random
from typing import Any

import torch

import autockpt
from autockpt.devices import get_device
from tests.policies.heads import small_llama

ROWS = 4


def document(draw: random.Random) -> int:
    """A length, of which most are short and a few are cut off at the longest."""
    short = draw.random() < 0.7
    return min(256, 8 + int(draw.lognormvariate(3.0, 0.4) if short else draw.lognormvariate(4.3, 0.6)))


def batch_of(length: int, number: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (ROWS, length), generator=torch.Generator().manual_seed(number)).to("standin")
    return {"input_ids": ids, "labels": ids}


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of one forward and backward."""
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def test_no_batch_fails_while_an_eighth_is_held():
    """A batch as long as the longest comes after the memory was taken: what it took before is no measure then."""
    budget, draw = 57_000_000, random.Random(7)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6, "max_position_embeddings": 512}
    model: Any = small_llama(vocab_size=512, use_cache=False, **sizes)().train().to("standin")
    plan = autockpt.Plan.model_validate(
        {
            "when": {"tokens": 2048},
            "choices": {"model.layers.*": "remake"},
            "smaller_batches": [{"when": {"tokens": 640}, "choices": {"model.layers.*": "save"}}],
        }
    )
    lengths = [2 * max(document(draw) for _ in range(ROWS)) for _ in range(60)]
    lengths[10] = lengths[25] = lengths[35] = lengths[55] = 512
    batches = [batch_of(length, number) for number, length in enumerate(lengths)]
    wanted = [gradients(model, batch) for batch in batches]
    model.zero_grad(set_to_none=True)
    get_device("standin").release()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.0), None
    with get_device("standin").limit(budget), autockpt.apply(model, plan, adaptive=f"{budget // 1000}KB") as handle:
        for number, (batch, plain) in enumerate(zip(batches, wanted, strict=True)):
            if number == 20:
                other = torch.empty(budget // 8, dtype=torch.uint8, device="standin")
            if number == 40:
                other = None
            assert all(map(torch.equal, gradients(model, batch), plain)), number
            optimizer.step()
    assert any(20 <= move.step < 40 and move.leaner > 0 for move in handle.moves), handle
    del other
