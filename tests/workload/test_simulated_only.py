"""Options of a workload that only simulated hardware can follow, and optimizers beyond AdamW."""

from __future__ import annotations

import pytest

from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build, refuse_simulated
from tests.errors import raises

MODEL = "tests.tracing.kernels.cuda_models:causal_fp32"


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"shard": 8}, "`shard: 8`"),
        ({"shard": "2x4 kept"}, "`shard: 2x4 kept`"),
        ({"ddp": "buckets"}, "`ddp: buckets`"),
        ({"master_weights": True}, "`master_weights: true`"),
        ({"keep_gradients": True}, "`keep_gradients: true`"),
    ],
)
def test_a_real_step_refuses_them_by_name(given: dict[str, object], option: str) -> None:
    spec = WorkloadSpec.model_validate({"model": MODEL} | given)
    for attempt in (refuse_simulated, build):
        with raises(UsageError, option) as caught:
            attempt(spec)
        assert "--hardware" in caught.value.remedy


@pytest.mark.slow
def test_they_can_be_traced_and_are_counted_afterwards() -> None:
    plain = WorkloadSpec(model=MODEL)
    peaks = []
    for spec in (plain, plain.model_copy(update={"keep_gradients": True, "ddp": "views", "optimizer": "adamw8bit"})):
        with Tracer.from_spec(spec, fallback=False) as tracer:
            peaks.append(tracer.trace().peak_bytes)
            settings = tracer.settings
    assert peaks[0] == peaks[1]
    assert settings["optimizer"] == "adamw8bit"
