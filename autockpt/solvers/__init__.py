"""Problem -> Assignment: the exact solvers."""

from autockpt.solvers.exact import exact
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Checked, Refined, refine
from autockpt.solvers.segments import Segments, refine_segmented
