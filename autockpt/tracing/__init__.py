"""The ghost run: a whole training cycle on tensors without memory, with or without choices, as a graph.

``tracer`` has the interface. It keeps the workload in child processes (``process``, ``pool``), where ``traced_run``
runs it under a dispatch mode that records every op (``recorder``; ``ghost``, which runs no kernels).
"""

from autockpt.tracing.fx import to_fx
from autockpt.tracing.tracer import Tracer, open_tracer, torch_device, trace
