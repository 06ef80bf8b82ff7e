from __future__ import annotations

from typing import Any

import pytest
import torch

from autockpt.devices.base import OffloadHandle, Transport
from autockpt.schema.graph import Tier
from autockpt.tracing.transport import GhostTransport, NotingTransport


class Log:
    """Writes down what happens, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.events.append(("allocate", nbytes))
        return torch.empty(nbytes, dtype=torch.uint8)

    def place(self, tensor: torch.Tensor) -> None:
        pass

    def copy_issued(self, direction: str, nbytes: int, back_from: Any = None, tier: str = "cpu") -> str:
        self.tier = tier if back_from is None else self.tier
        self.events.append((direction, nbytes))
        return direction

    def copy_awaited(self, copy: Any) -> None:
        self.events.append(("await", copy))

    def copy_released(self, copy: Any) -> None:
        self.events.append(("released", copy))


def ghost(log: Any, queues: bool, tier: Tier = "cpu") -> NotingTransport:
    return NotingTransport(GhostTransport(log.allocate, queues), log, tier)


@pytest.fixture(params=[False, True], ids=["inline", "queues"])
def queues(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_protocols(queues: bool) -> None:
    transport = ghost(Log(), queues)
    assert isinstance(transport, Transport)
    assert isinstance(transport.send(torch.empty(8, dtype=torch.uint8)), OffloadHandle)
    assert transport.copy_queues is queues


def test_the_source_is_the_device_side_until_it_is_settled(queues: bool) -> None:
    log = Log()
    source = torch.empty(8, dtype=torch.uint8)
    handle = ghost(log, queues).send(source)
    handle.fetch()
    assert handle.get() is source
    assert handle.nbytes == 8
    assert log.events == [("out", 8)]


def test_a_round_trip(queues: bool) -> None:
    log = Log()
    handle = ghost(log, queues).send(torch.empty(8, dtype=torch.uint8))
    handle.settle()
    handle.settle()
    handle.fetch()
    started_early = ("in", 8) in log.events
    assert started_early is queues
    first = handle.get()
    assert handle.get() is first
    assert log.events.count(("out", 8)) == log.events.count(("in", 8)) == log.events.count(("allocate", 8)) == 1
    assert log.events.count(("await", "out")) == 1
    assert log.events[-1] == ("await", "in")


def test_what_was_released_can_be_fetched_again(queues: bool) -> None:
    log = Log()
    handle = ghost(log, queues).send(torch.empty(8, dtype=torch.uint8))
    handle.settle()
    first = handle.get()
    handle.release()
    assert handle.get() is not first
    assert log.events.count(("in", 8)) == 2


def test_settling_lets_go_of_the_source() -> None:
    import weakref

    source = torch.empty(8, dtype=torch.uint8)
    alive = weakref.ref(source)
    handle = ghost(Log(), False).send(source)
    del source
    assert alive() is not None
    handle.settle()
    assert alive() is None


def test_the_log_hears_of_the_tier_and_of_the_end(queues: bool) -> None:
    log = Log()
    handle = ghost(log, queues, "disk").send(torch.empty(8, dtype=torch.uint8))
    handle.settle()
    handle.get()
    assert log.tier == "disk"
    assert ("released", "out") not in log.events
    del handle
    assert log.events[-1] == ("released", "out")
