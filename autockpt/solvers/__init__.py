"""Problem to Assignment: the exact solver, and the refinement that corrects its bytes by ghost runs."""

from autockpt.solvers.exact import exact, leanest
from autockpt.solvers.refine import Checked, Refined, refine
from autockpt.solvers.segments import Segments, refine_segmented
from autockpt.solvers.split import refine_split, split_plans
