"""Options of a workload that only simulated hardware can follow, and optimizers beyond AdamW."""

from __future__ import annotations

import pytest
from torch import nn

from autockpt.errors import UsageError
from autockpt.schema import SearchRequest, WorkloadSpec, parse_budget
from autockpt.shipped import load_space
from autockpt.tracing import Tracer
from autockpt.tuning import run_search
from autockpt.workload import build, refuse_simulated
from autockpt.workload.build import make_optimizer

MODEL = "tests.tracing.kernels.cuda_models:causal_fp32"


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"shard": 8}, "--shard 8"),
        ({"ddp": "buckets"}, "--ddp buckets"),
        ({"master_weights": True}, "--master-weights"),
        ({"keep_gradients": True}, "--keep-gradients"),
    ],
)
def test_a_real_step_refuses_them_by_name(given: dict[str, object], option: str) -> None:
    spec = WorkloadSpec.model_validate({"model": MODEL} | given)
    for attempt in (refuse_simulated, build):
        with pytest.raises(UsageError, match=option) as caught:
            attempt(spec)
        assert "--hardware" in caught.value.remedy


def test_a_measured_search_refuses_them_before_it_begins() -> None:
    spec = WorkloadSpec(model=MODEL, shard=2)
    request = SearchRequest(budget=parse_budget("1GB"), workload=spec, space=load_space("knobs"), device="cpu")
    with pytest.raises(UsageError, match="--shard 2"):
        run_search(request)


def test_nothing_is_refused_otherwise() -> None:
    refuse_simulated(WorkloadSpec(model=MODEL))


@pytest.mark.slow
def test_they_can_be_traced_and_are_counted_afterwards() -> None:
    plain = WorkloadSpec(model=MODEL)
    peaks = []
    for spec in (plain, plain.model_copy(update={"shard": 4, "ddp": "views", "optimizer": "adamw8bit"})):
        with Tracer.from_spec(spec, fallback=False) as tracer:
            peaks.append(tracer.trace().peak_bytes)
            settings = tracer.settings
    assert peaks[0] == peaks[1]
    assert settings["optimizer"] == "adamw8bit"


def test_eight_bit_states_need_cuda() -> None:
    with pytest.raises(UsageError, match="CUDA"):
        make_optimizer("adamw8bit", nn.Linear(2, 2))


@pytest.mark.slow
def test_adafactor_keeps_rows_and_columns() -> None:
    with Tracer.from_spec(WorkloadSpec(model=MODEL, optimizer="adafactor"), fallback=False) as tracer:
        graph = tracer.trace()
    weights = graph.resident["weights"]
    assert 0 < graph.resident["optimizer states"] < weights / 4
