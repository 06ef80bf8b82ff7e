"""Bytes of every point of a problem under an assignment, kept up to date change by change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autockpt.schema.problem import Problem
from autockpt.solvers.chain import own_bytes, strongest


class Ledger:
    """An assignment (option indices ``picks``) with the ``bytes`` of the points that may bind, int64."""

    def __init__(self, problem: Problem, picks: Sequence[int]) -> None:
        self.problem = problem
        self.points = strongest(problem.points)
        self.prefix = np.array([p.prefix for p in self.points], dtype=np.int64)
        self.owned: list[list[int]] = [[] for _ in problem.units]
        for index, p in enumerate(self.points):
            if p.own is not None:
                self.owned[p.own].append(index)
        self.picks = list(picks)
        kept = [u.options[j].kept for u, j in zip(problem.units, picks, strict=True)]
        before = np.concatenate([[0], np.cumsum(np.array(kept, dtype=np.int64))])
        self.bytes = np.array([p.base for p in self.points], dtype=np.int64) + before[self.prefix]
        for i, owned in enumerate(self.owned):
            for index in owned:
                self.bytes[index] += own_bytes(problem.units[i].options[picks[i]], self.points[index])

    def peak_after(self, i: int, j: int) -> int:
        """Peak bytes if unit ``i`` took its option ``j``."""
        return int(self.after(i, j).max(initial=0))

    def after(self, i: int, j: int) -> np.ndarray:
        """Bytes of every point if unit ``i`` took its option ``j``."""
        old, new = self.problem.units[i].options[self.picks[i]], self.problem.units[i].options[j]
        changed = self.bytes + (self.prefix > i) * (new.kept - old.kept)
        for index in self.owned[i]:
            changed[index] += own_bytes(new, self.points[index]) - own_bytes(old, self.points[index])
        return changed

    def take(self, i: int, j: int) -> None:
        """Give unit ``i`` its option ``j``."""
        self.bytes = self.after(i, j)
        self.picks[i] = j
