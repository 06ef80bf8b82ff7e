"""Ghost runs as a described device sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from autockpt.profiling.cuda_memory import as_seen_by
from autockpt.schema import Choice, Graph, WorkloadSpec
from autockpt.schema.hardware import Hardware


class _Traces(Protocol):
    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph: ...


class DeviceTraces:
    """Traces plans, with what the device's libraries and the workload's settings add, drop or divide in each."""

    def __init__(self, inner: _Traces, hardware: Hardware, spec: WorkloadSpec) -> None:
        self._inner, self._hardware, self._spec = inner, hardware, spec

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        """The ghost run of these choices; see ``as_seen_by``."""
        return as_seen_by(self._hardware, self._inner.trace(choices), self._spec)
