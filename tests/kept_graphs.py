"""Ghost runs of described jobs, each run once for all tests: a graph depends on the job and the plan alone.

tests/tracing holds that, without this. Most of what a search takes in a test is ghost runs, mostly of the same models.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from autockpt.schema import Choice, Graph
from autockpt.tracing import tracer
from autockpt.tracing.assemble import GraphSource
from autockpt.tracing.pool import MOST, GhostPool
from autockpt.tracing.process import Build, GhostProcess, NotForkable
from autockpt.tracing.traced_run import FirstCycle

_start = tracer._start
_found: dict[Any, FirstCycle] = {}
_graphs: dict[Any, Graph] = {}


class Job:
    """Stands for the process that is started once something is asked that no job like it was asked."""

    def __init__(self, source: GraphSource, build: Build) -> None:
        spec, device, capability = build
        self.key = source, spec.model_dump_json(), spec.files, str(device), capability
        self._how = source, build
        if self.key not in _found:
            _found[self.key] = self.process.first_cycle

    @cached_property
    def process(self) -> GhostProcess:
        return _start(*self._how)


class KeptPool(GhostPool):
    """Asks its process for what is not known by now; one of a live step asks for everything."""

    def __init__(self, first: GhostProcess | Job, most: int = MOST) -> None:
        self._job = first if isinstance(first, Job) else None
        if isinstance(first, Job):
            self.first_cycle = _found[first.key]
        else:
            super().__init__(first, most)

    def with_another(self, build: Build) -> GhostPool:
        raise NotForkable("its process may not have been started")

    def ahead(self, plans: Iterable[Mapping[str, Choice]]) -> None:
        if self._job is None:
            super().ahead(plans)

    def trace(self, choices: Mapping[str, Choice]) -> Graph:
        if self._job is None:
            return super().trace(choices)
        key = self._job.key, tuple(choices.items())
        if key not in _graphs:
            if not hasattr(self, "_processes"):
                super().__init__(self._job.process)
            _graphs[key] = super().trace(choices)
        return _graphs[key]

    def close(self) -> None:
        if self._job is None:
            super().close()
        elif "process" in vars(self._job):
            self._job.process.close()
