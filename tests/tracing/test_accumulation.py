"""Cycles of many micro-batches are ghost-run up to the second; bytes, seconds, FLOPs are those of the whole."""

import pytest

from autockpt.cost import simulated_memory
from autockpt.cost.roofline import roofline_times
from autockpt.cost.simulation import simulate
from autockpt.schema import WorkloadSpec
from autockpt.shipped import load_hardware
from autockpt.tracing import traced_run
from tests.tracing.reference import ghosts
from tests.tuning.small import TWO_LAYERS

CARD = load_hardware("rtx4090")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plans", "settings"),
    [
        (TWO_LAYERS, ("save", "offload", "recompute_offload"), {"dtype": "bf16", "lora": 4}),
        ("gpt2-tiny", ("offload",), {"autocast": "bf16"}),
        ("mixtral-tiny", ("recompute",), {}),
    ],
)
def test_two_micro_batches_tell_what_five_would(
    model: str, plans: tuple[str, ...], settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = WorkloadSpec(model=model, batch_size=2, seq_len=128, accumulate=5, **settings)
    short = ghosts(spec, *plans, hardware=CARD)
    monkeypatch.setattr(traced_run, "MICRO_BATCHES", 100)  # the tracer's process is a fork of this one
    whole = ghosts(spec, *plans, hardware=CARD)
    times = roofline_times(CARD, [*whole, *short])
    needs = simulated_memory(CARD)
    for kind, a, b in zip(plans, short, whole, strict=True):
        assert (a.repeated, b.repeated) == (3, 0) and len(b.ops) > 2 * len(a.ops)
        assert a.peak_bytes == b.peak_bytes, kind
        assert needs(a) == needs(b), kind
        assert a.flops == b.flops and sum(a.runs) == len(b.ops) and sum(a.copied) == len(b.copies)
        here, there = simulate(a, times), simulate(b, times)
        assert here.step_seconds == pytest.approx(there.step_seconds, rel=1e-9 if not a.copies else 0.005), kind
        for unit, seconds in there.seconds_by_unit.items():
            assert here.seconds_by_unit[unit] == pytest.approx(seconds, rel=1e-6), unit
