"""Ghost runs of described jobs, each run once for all tests: a graph depends on the job and the plan alone.

tests/tracing holds that, without this. Most of what a search takes in a test is ghost runs, mostly of the same models.
Models that code makes are traced again: tests write other code under the same name, and patch what it reads.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from autockpt.schema import Choice, Graph
from autockpt.tracing import tracer
from autockpt.tracing.assemble import GraphSource
from autockpt.tracing.pool import MOST, GhostPool
from autockpt.tracing.process import Build, GhostProcess
from autockpt.tracing.traced_run import FirstCycle

_start = tracer._start
_found: dict[Any, FirstCycle] = {}
_graphs: dict[Any, Graph] = {}


def start(source: GraphSource, build: Build) -> Any:
    """In place of the tracer's own."""
    return _start(source, build) if build[0].files is None else Job(source, build)


class Job:
    """A process of the tracer that is started once it is asked for something."""

    def __init__(self, source: GraphSource, build: Build) -> None:
        spec, device, capability = self._build = build
        self._source, self.key = source, (source, spec.model_dump_json(), spec.files, str(device), capability)
        self.first_cycle = _found.get(self.key) or _found.setdefault(self.key, self.process.first_cycle)

    @cached_property
    def process(self) -> GhostProcess:
        return _start(self._source, self._build)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)

    def close(self) -> None:
        if "process" in vars(self):
            self.process.close()


class KeptPool(GhostPool):
    """Asks for what is not known by now; of a live step for everything."""

    def __init__(self, first: Any, most: int = MOST) -> None:
        super().__init__(first, 1 if isinstance(first, Job) else most)

    def trace(self, choices: Mapping[str, Choice]) -> Graph:
        if not isinstance(self._first, Job):
            return super().trace(choices)
        key = self._first.key, tuple(choices.items())
        if key not in _graphs:
            _graphs[key] = super().trace(choices)
        return _graphs[key]
