"""What can be done with a unit's activations: one file per choice, and the table of them all."""

from autockpt.policies.base import Policy, SavePolicy
from autockpt.policies.chunked_head import ChunkedLossPolicy, ChunkedSoftmaxPolicy
from autockpt.policies.compile_budget import CompileBudgetPolicy
from autockpt.policies.offload import OffloadPolicy, RecomputeOffloadPolicy
from autockpt.policies.recompute import RecomputePolicy
from autockpt.policies.rematerialize import RemakePolicy
from autockpt.policies.segment import SegmentPolicy
from autockpt.policies.selective import SelectivePolicy

POLICIES: dict[str, Policy] = {
    "save": SavePolicy(),
    "recompute": RecomputePolicy(),
    "keep_attention": SelectivePolicy(),
    "selective": SelectivePolicy(),
    "remake": RemakePolicy(),
    "offload": OffloadPolicy(),
    "recompute_offload": RecomputeOffloadPolicy(),
    "segment": SegmentPolicy(),
    "chunked_softmax": ChunkedSoftmaxPolicy(),
    "chunked_loss": ChunkedLossPolicy(),
    "compile_budget": CompileBudgetPolicy(),
}
