"""Pure numbers: an op timeline, op times and copy queues become step time and bytes over time. No torch."""

from autockpt.simulator.step import (
    Simulation,
    bytes_timeline,
    micro_batch_of,
    op_seconds,
    phases_of,
    simulate,
)
