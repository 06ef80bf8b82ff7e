"""Problem -> Assignment: the exact solvers."""

from autockpt.solvers.exact import exact, leanest
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp
from autockpt.solvers.refine import Checked, Refined, refine
from autockpt.solvers.runs import refine_two_runs, rest_saves, two_runs
from autockpt.solvers.segments import Segments, refine_segmented
