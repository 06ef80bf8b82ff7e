"""Pure numbers: an op timeline, op times and copy queues become step time and bytes over time. No torch."""

from autockpt.simulator.step import Simulation, bytes_timeline, op_seconds, simulate
