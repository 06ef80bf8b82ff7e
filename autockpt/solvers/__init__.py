"""Problem -> Assignment: the exact solvers and the fast fallback."""

from autockpt.solvers.exact import exact
from autockpt.solvers.greedy import greedy
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Checked, Refined, refine

__all__ = ["Checked", "Refined", "exact", "greedy", "labels", "milp", "refine"]
