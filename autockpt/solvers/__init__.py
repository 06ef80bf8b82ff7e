"""Problem -> Assignment: the exact solvers, the fast fallback, and the baselines every user knows."""

from autockpt.solvers.baselines import chen_sqrt, every_nth, first_k, none, offload_all, recompute_all, uniform
from autockpt.solvers.exact import exact
from autockpt.solvers.greedy import greedy, polish
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Referee, Refined, Ruling, refine

__all__ = [
    "Referee",
    "Refined",
    "Ruling",
    "chen_sqrt",
    "every_nth",
    "exact",
    "first_k",
    "greedy",
    "labels",
    "milp",
    "none",
    "offload_all",
    "polish",
    "recompute_all",
    "refine",
    "uniform",
]
