"""Adaptive training by an allocator's own counters, under a limit that is real."""

from __future__ import annotations

import random

import torch

import autockpt
from autockpt.devices import get_device
from tests.evidence import lengths
from tests.standin.inside.scenarios import Model

standin = torch.get_device_module("standin")


def trained(model: torch.nn.Module, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    model.zero_grad(set_to_none=True)
    model(torch.randn(rows, 64).to("standin")).backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_it_stays_within_a_real_limit_when_others_take_memory_and_goes_back():
    torch.manual_seed(0)
    model = Model().to("standin")
    wanted = trained(model, 8192)
    standin.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    trained(model, 8192)
    held, peak = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
    limit = int(peak * 1.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = autockpt.Plan.model_validate({"choices": {f"blocks.{n}": "save" for n in range(4)}})
    with get_device("standin").limit(2 * limit), autockpt.apply(model, plan, adaptive=f"{limit // 1000}KB") as handle:
        other = None
        for step in range(50):
            if step == 6:
                other = torch.empty(int(limit * 0.97) - held, dtype=torch.uint8, device="standin")
            if step == 14:
                other = None
            found = trained(model, 8192)
            assert all(map(torch.equal, found, wanted)), step
            optimizer.step()
        assert any(move.leaner > 0 for move in handle.moves), handle
        assert handle.moves[-1].leaner < max(move.leaner for move in handle.moves), handle
    del other


def test_no_batch_runs_out_of_memory_while_somebody_holds_an_eighth_of_it():
    """A batch as long as the longest comes after the memory was taken: what it took before is no measure then."""
    budget, draw = 57_000_000, random.Random(7)
    model = lengths.made_model("standin")
    plan = autockpt.Plan.model_validate(
        {
            "when": {"tokens": 2048},
            "choices": {"model.layers.*": "remake"},
            "smaller_batches": [{"when": {"tokens": 640}, "choices": {"model.layers.*": "save"}}],
        }
    )
    sizes = [2 * max(lengths.documents(draw) for _ in range(lengths.ROWS)) for _ in range(60)]
    sizes[10] = sizes[25] = sizes[35] = sizes[55] = 512
    batches = list(lengths.made(sizes, "standin"))
    wanted = [lengths.digest(lengths.trained(model, batch)) for batch in batches]
    lengths.released(model)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.0), None
    with get_device("standin").limit(budget), autockpt.apply(model, plan, adaptive=f"{budget // 1000}KB") as handle:
        for number, (batch, plain) in enumerate(zip(batches, wanted, strict=True)):
            if number == 20:
                other = torch.empty(budget // 8, dtype=torch.uint8, device="standin")
            if number == 40:
                other = None
            assert lengths.digest(lengths.trained(model, batch)) == plain, number
            optimizer.step()
    assert any(20 <= move.step < 40 and move.leaner > 0 for move in handle.moves), handle
    del other
