"""Problem -> Assignment: the exact solvers and the fast fallback."""

from autockpt.solvers.exact import exact
from autockpt.solvers.greedy import greedy
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Checked, Refined, refine
from autockpt.solvers.segments import Segments, refine_segmented

__all__ = [
    "Checked",
    "Refined",
    "Segments",
    "exact",
    "greedy",
    "labels",
    "milp",
    "refine",
    "refine_segmented",
]
