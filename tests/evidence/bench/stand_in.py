"""A worker without a process: the same functions, called here on a small workload, JSON both ways."""

from __future__ import annotations

import importlib
import json
from typing import Any

from autockpt.devices import get_device
from autockpt.measuring import StepRunner, environment_of
from tests.measuring.small_workloads import make_workload


class HereMeasurer:
    """What ``run_bench`` needs of a WorkerMeasurer."""

    def __init__(self, *_: Any) -> None:
        device = get_device("cpu")
        self.runner = StepRunner(make_workload(), device)
        self.environment = environment_of(device)
        self.settings: dict[str, Any] = {"batch_size": 256}
        self.notes: tuple[str, ...] = ()
        self.calls: list[str] = []
        self.interrupt_at = ""

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        module, name = ref.split(":")
        self.calls.append(name)
        if name == self.interrupt_at:
            raise KeyboardInterrupt
        function = getattr(importlib.import_module(module), name)
        return json.loads(json.dumps(function(self.runner, json.loads(json.dumps(payload)))))

    def rest(self) -> None: ...

    def __enter__(self) -> HereMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
