"""Solve the planning problem: an exact solver, and refinement by ghost runs, as real bytes do not quite add up.

Pure numbers: solvers know neither models nor PyTorch.
"""

from autockpt.solvers.exact import exact, leanest
from autockpt.solvers.refine import Checked, Refined, refine
from autockpt.solvers.segments import Segments, refine_segmented
from autockpt.solvers.split import refine_split, split_plans
