"""What each choice costs on each kind of unit: op times, menus, the planning problem, predictions."""

from autockpt.profiling.predictor import (
    MemoryModel,
    Predictor,
    Traces,
    memory_at_hand,
    needed_on,
    said_of,
    simulated_memory,
)
from autockpt.profiling.problem import build_problem
from autockpt.profiling.profile import (
    LEAN_CALLS,
    CostModel,
    UniformRuns,
    build_profile,
    cached_op_times,
    forget_op_times,
    measure_op_times,
    uniform_graphs,
    used_by_others,
)
