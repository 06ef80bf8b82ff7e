"""Problem -> Assignment: the exact solvers and the fast fallback."""

from autockpt.solvers.exact import exact
from autockpt.solvers.greedy import greedy
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Refined, Ruling, refine

__all__ = ["Refined", "Ruling", "exact", "greedy", "labels", "milp", "refine"]
