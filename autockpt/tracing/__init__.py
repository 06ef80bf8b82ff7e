"""The ghost run: from a workload, with or without choices, to the graph of its whole training cycle."""

from autockpt.tracing.fx import to_fx
from autockpt.tracing.tracer import Tracer, open_tracer, torch_device, trace
