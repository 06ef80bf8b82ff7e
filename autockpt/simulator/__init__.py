"""Pure numbers: an op timeline, op times and copy queues become step time and bytes over time. No torch."""

from autockpt.simulator.step import (
    REMAINDER,
    Simulation,
    bytes_timeline,
    micro_batch_of,
    op_seconds,
    phases_of,
    simulate,
)

__all__ = ["REMAINDER", "Simulation", "bytes_timeline", "micro_batch_of", "op_seconds", "phases_of", "simulate"]
