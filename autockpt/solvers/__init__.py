"""Problem -> Assignment: the exact solvers and the fast fallback."""

from autockpt.solvers.exact import exact
from autockpt.solvers.greedy import greedy, polish
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Referee, Refined, Ruling, refine

__all__ = [
    "Referee",
    "Refined",
    "Ruling",
    "exact",
    "greedy",
    "labels",
    "milp",
    "polish",
    "refine",
]
