"""The known error of simulated steps, and what they leave out, as every view shows it."""

from __future__ import annotations

import pytest

from autockpt.cost.roofline import environment_of_hardware
from autockpt.schema import Environment, WorkloadSpec
from autockpt.schema.step_note import step_note
from autockpt.shipped import load_hardware


def simulated(card: str) -> Environment:
    return environment_of_hardware(load_hardware(card))


@pytest.mark.parametrize(("card", "says"), [("h100", "too short"), ("cpu", "too short"), ("m4-max", "not known")])
def test_simulated_steps_carry_their_known_error(card: str, says: str) -> None:
    assert says in step_note(simulated(card), None)


def test_steps_of_a_device_that_is_here_carry_none() -> None:
    here = Environment(device=simulated("h100").device, versions={"torch": "2.13.0"})
    assert step_note(here, WorkloadSpec(model="x")) == step_note(None, None) == ""


@pytest.mark.parametrize(
    ("options", "says"), [({"shard": 8}, "collectives over 8 ranks"), ({"ddp": "views"}, "all-reduce"), ({}, None)]
)
def test_communication_that_is_left_out_is_named(options: dict[str, object], says: str | None) -> None:
    note = step_note(simulated("h100"), WorkloadSpec.model_validate({"model": "x", **options}))
    assert "not counted" in note and says in note if says else "not counted" not in note
