"""The cost model: op times, what each choice costs on each kind of layer, the planning problem, predictions.

``profile.build_profile`` is where it is made: ghost runs and op times go in, a ``CostModel`` comes out.
"""

from autockpt.cost.op_times import cached_op_times
from autockpt.cost.op_times import forget as forget_op_times
from autockpt.cost.predictor import MemoryModel, Predictor, local_memory, memory_note, simulated_memory
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
