from __future__ import annotations

from typing import Any

import pytest
import typer

from autockpt.cli.app import build
from autockpt.cli.options import WORKLOAD_OPTIONS, duration, workload_spec
from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec


def test_every_field_of_a_workload_has_an_option() -> None:
    assert set(WORKLOAD_OPTIONS) | {"seed"} == set(WorkloadSpec.model_fields)


def test_options_lie_over_a_plans_own() -> None:
    base = WorkloadSpec(model="llama-tiny", batch_size=4, packed=True)
    spec = workload_spec({"batch_size": 8, "packed": False}, base=base)
    assert (spec.model, spec.batch_size, spec.packed) == ("llama-tiny", 8, False)
    assert workload_spec({}, base=base) == base
    assert workload_spec({}, default="gpt2-tiny", seed=3) == WorkloadSpec(model="gpt2-tiny", seed=3)


def test_only_a_search_looks_for_the_longest_sequences_and_says_so() -> None:
    command: Any = typer.main.get_command(build())
    said = {
        verb: option.metavar
        for verb, known in command.commands.items()
        for option in known.params
        if "--seq-len" in option.opts
    }
    assert said.pop("search") == "N|auto"
    assert set(said) == {"diagnose", "explain", "verify"} and set(said.values()) == {"N"}


def test_without_a_model_there_is_a_remedy() -> None:
    with pytest.raises(UsageError, match="no model"):
        workload_spec({})


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "fp8"), ("optimizer", "lion"), ("max_grad_norm", -1.0), ("seq_len", 10**11)]
)
def test_values_that_are_not_allowed_name_the_option(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"--{field.replace('_', '-')} {value}"):
        workload_spec({"model": "x", field: value})


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("0.5", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-3", "0", "3d", "1e3", "10 m", "nan"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        duration(text)
    assert duration(None) is None
