"""What a device refuses is found out by real steps, where nobody knows its backend."""

from __future__ import annotations

from importlib import import_module
from itertools import count
from typing import Any

import pytest

from autockpt.cost.op_times import refused_choices
from autockpt.devices import get_device
from autockpt.measuring import StepRunner
from autockpt.policies import watched_backends
from autockpt.schema import SAVE, DeviceInfo, Environment
from tests.measuring.small_workloads import RECOMPUTE_ALL, make_workload

KINDS = ("save", "recompute", "selective", "remake", "offload")
PLAIN = dict.fromkeys(RECOMPUTE_ALL, SAVE)


class Here:
    """Runs what a measurer is asked on the CPU, which says to be something else."""

    def __init__(self, kind: str) -> None:
        self.runner = StepRunner(make_workload(), get_device("cpu"))
        self.environment = Environment(device=DeviceInfo(kind=kind, name="a card", capacity_bytes=2**30), versions={})
        self.asked = 0

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        module, _, name = ref.partition(":")
        return getattr(import_module(module), name)(self.runner, payload)


@pytest.fixture
def unknown(monkeypatch) -> Here:
    here = Here("npu")
    monkeypatch.setattr(watched_backends, "KNOWN", ())
    return here


def test_what_it_changes_is_left_out_with_the_reason(unknown: Any, monkeypatch):
    others = count()
    monkeypatch.setattr(watched_backends, "_bits", lambda *whatever, **watched: [str(next(others))])
    refused = refused_choices(unknown, PLAIN, KINDS)
    assert list(refused) == ["remake"]
    assert all("layers.0 gives other bits" in why for why in refused.values())
