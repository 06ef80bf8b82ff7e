"""What can be done with a unit's activations: one file per choice, and the table of them all."""

from autockpt.policies.base import Attach, attach_nothing
from autockpt.policies.chunked_head import attach_chunked_loss, attach_chunked_softmax
from autockpt.policies.compile_budget import attach_compile_budget
from autockpt.policies.offload import attach_offload, attach_recompute_offload
from autockpt.policies.recompute import attach_recompute
from autockpt.policies.rematerialize import attach_remake
from autockpt.policies.segment import attach_segment
from autockpt.policies.selective import attach_selective

# in the order in which they are attached: those that move tensors also stand around units of other choices
POLICIES: dict[str, Attach] = {
    "save": attach_nothing,
    "recompute": attach_recompute,
    "keep_attention": attach_selective,
    "selective": attach_selective,
    "remake": attach_remake,
    "segment": attach_segment,
    "chunked_softmax": attach_chunked_softmax,
    "chunked_loss": attach_chunked_loss,
    "compile_budget": attach_compile_budget,
    "offload": attach_offload,
    "recompute_offload": attach_recompute_offload,
}
