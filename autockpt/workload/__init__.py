"""The training step that is planned for: models, batches, units, and the whole accumulation cycle (``Step``)."""

from autockpt.workload.build import build, preload, refuse_simulated
from autockpt.workload.failures import step_failed, workload_error
from autockpt.workload.losses import find_loss
from autockpt.workload.step import BUCKETS, Step, ddp_of
from autockpt.workload.storages import cut_tensors, move, nested_tensors
from autockpt.workload.units import discover_head, discover_units, fingerprint
