"""A pool of processes with the same ghost workload, which ghost-run several plans in parallel.

Solvers ask for one plan at a time; ``ahead`` tells the pool which ones they will need.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait
from typing import Any

from autockpt.errors import AutockptError
from autockpt.schema.choices import Choice
from autockpt.schema.graph import Graph
from autockpt.tracing.process import TRACE, Build, GhostProcess, NotForkable, can_fork

MOST = 4
WORTH = 0.2  # seconds of waiting ghost runs that make a further process worthwhile

_Key = tuple[tuple[str, Choice], ...]


class GhostPool:
    """Answers as the process ``first`` would, with up to ``most`` processes that are forked from it when needed.

    A fork that dies is not replaced; the death of the first is an error.
    """

    def __init__(self, first: GhostProcess, most: int = MOST) -> None:
        self._first, self._most = first, most
        self._processes = [first]
        self._waiting: dict[_Key, Mapping[str, Choice]] = {}
        self._busy: dict[GhostProcess, _Key] = {}
        self._done: dict[_Key, Any] = {}
        self._seconds = 0.0  # of the last ghost run that was waited for
        self.first_cycle = first.first_cycle

    def with_another(self, build: Build) -> GhostPool:
        """A pool for another workload, whose first process is forked from this one's to ``build`` it.

        Raises NotForkable, or what building raises.
        """
        if self._most == 1 or self._first in self._busy:
            raise NotForkable("it is not for ghost runs, or has something to do")
        return GhostPool(self._first.fork_again(build), self._most)

    def ahead(self, plans: Iterable[Mapping[str, Choice]]) -> None:
        """Begin with plans that ``trace`` will be asked for, in this order."""
        self._waiting = {tuple(plan.items()): plan for plan in plans}
        self._done.clear()
        worth = can_fork() and len(self._waiting) * self._seconds >= WORTH
        size = min(self._most, len(self._waiting), len(os.sched_getaffinity(0))) if worth else 1
        while len(self._processes) < size and self._first not in self._busy:
            try:
                self._processes.append(self._first.fork_again())
            except (AutockptError, NotForkable, OSError):
                break
        if len(self._processes) == 1:
            self._waiting.clear()
        self._hand_out()

    def trace(self, choices: Mapping[str, Choice]) -> Graph:
        """The graph of a plan. Raises what the run raised, or GhostError where the first process died."""
        key, began, alone = tuple(choices.items()), time.monotonic(), not self._busy
        while key not in self._done:
            if key not in self._busy.values():
                self._waiting = {key: choices} | self._waiting
            self._hand_out()
            if key not in self._done:
                self._collect()
        if alone:
            self._seconds = time.monotonic() - began
        self._hand_out()
        found = self._done.pop(key)
        if isinstance(found, AutockptError):
            raise found
        return found

    def close(self) -> None:
        """End all processes. Idempotent."""
        for process in reversed(self._processes):  # the first waits for those that were forked from it
            process.close()

    def _hand_out(self) -> None:
        for process in [p for p in self._processes if p not in self._busy][: len(self._waiting)]:
            key = next(iter(self._waiting))
            try:
                process.send(TRACE, self._waiting[key])
            except AutockptError as error:
                self._failed(process, key, error)
            else:
                self._busy[process] = key
                del self._waiting[key]

    def _collect(self) -> None:
        """Receive the results of processes that are ready."""
        try:
            ready = wait([process.connection for process in self._busy])
        except BaseException:  # interrupted: all processes are busy with unwanted work
            self.close()
            raise
        for process in [p for p in self._busy if p.connection in ready]:
            key = self._busy.pop(process)
            try:
                self._done[key] = process.receive()
            except AutockptError as error:
                self._failed(process, key, error)

    def _failed(self, process: GhostProcess, key: _Key, error: AutockptError) -> None:
        if process.connection.closed and process is not self._first:
            self._processes.remove(process)
            process.close()
        else:
            self._waiting.pop(key, None)
            self._done[key] = error
