"""What a plan costs: op times, menus of choices, the planning problem, predictions."""

from autockpt.cost.op_times import cached_op_times
from autockpt.cost.op_times import forget as forget_op_times
from autockpt.cost.predictor import MemoryModel, Predictor, Traces, local_memory, memory_note, simulated_memory
from autockpt.cost.problem import build_problem
from autockpt.cost.profile import (
    LEAN_CALLS,
    CostModel,
    UniformRuns,
    build_profile,
    measure_op_times,
    uniform_graphs,
    used_by_others,
)
