"""What is being planned for: model sources, batches, units, and the whole training cycle."""

from autockpt.schema.names import strip_prefixes
from autockpt.workload.build import build, make_optimizer, refuse_simulated
from autockpt.workload.core import Mark, Step, Workload
from autockpt.workload.failures import explain, is_out_of_memory
from autockpt.workload.live import from_live, move
from autockpt.workload.losses import default_step, find_loss, loss_of
from autockpt.workload.storages import nested_tensors, storage_bytes
from autockpt.workload.units import discover_head, discover_units, fingerprint, module_of

__all__ = [
    "Mark",
    "Step",
    "Workload",
    "build",
    "default_step",
    "discover_head",
    "discover_units",
    "explain",
    "find_loss",
    "fingerprint",
    "from_live",
    "is_out_of_memory",
    "loss_of",
    "make_optimizer",
    "module_of",
    "move",
    "nested_tensors",
    "refuse_simulated",
    "storage_bytes",
    "strip_prefixes",
]
