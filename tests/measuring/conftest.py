"""Conditions for the tests of measuring, and a user's file to measure."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autockpt.checkpointing.fingerprint import fingerprint
from tests.measuring.small_workloads import FACTORY, make_workload


@pytest.fixture(autouse=True, scope="session")
def _first_step() -> None:
    """The first optimizer step imports much."""
    make_workload().cycle()


@pytest.fixture(autouse=True)
def _state_around_each_test() -> Iterator[None]:
    """Measuring seeds the global generators; no test should see another's."""
    states = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    torch.set_rng_state(states[1])


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current directory, with functions that make workloads."""
    (tmp_path / "my_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_factory", raising=False)
    return "my_factory"


@pytest.fixture(autouse=True, scope="session")
def place_numbers() -> None:
    """Half a MiB that is made once a process, where tensors are first compared; more than what is measured here."""
    fingerprint(torch.zeros(1))
