"""What is being planned for: model sources, batches, units, and the whole training cycle."""

from autockpt.schema.names import strip_prefixes
from autockpt.workload.build import build, make_optimizer, preload, refuse_simulated, sequence_length
from autockpt.workload.failures import explain, is_out_of_memory, step_failed
from autockpt.workload.losses import default_loss, find_loss, loss_of
from autockpt.workload.step import Loss, Mark, Step
from autockpt.workload.storages import cut_tensors, each_tensor, move, nested_tensors, storage_bytes
from autockpt.workload.units import discover_head, discover_units, fingerprint, module_of

__all__ = [
    "Loss",
    "Mark",
    "Step",
    "build",
    "cut_tensors",
    "default_loss",
    "discover_head",
    "discover_units",
    "each_tensor",
    "explain",
    "find_loss",
    "fingerprint",
    "is_out_of_memory",
    "loss_of",
    "make_optimizer",
    "module_of",
    "move",
    "nested_tensors",
    "preload",
    "refuse_simulated",
    "sequence_length",
    "step_failed",
    "storage_bytes",
    "strip_prefixes",
]
