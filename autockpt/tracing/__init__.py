"""The ghost run: from a workload, with or without choices, to the graph of its whole training cycle."""

from autockpt.tracing.fx import to_fx
from autockpt.tracing.on_hardware import open_tracer, torch_device, tracer_for
from autockpt.tracing.tracer import Tracer, trace
