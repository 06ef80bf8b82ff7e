"""A pytest plugin for processes that have the stand-in: a race fails the test in which it was found."""

from collections.abc import Iterator

import pytest
import torch

standin = torch.get_device_module("standin")


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    standin.extension.clear_races()
    yield
    standin.synchronize()  # an error of a kernel that is still queued belongs to this test
    assert not standin.races()
