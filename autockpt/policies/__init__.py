"""What can be done with a unit's activations: one file per choice, and the table of them all."""

from autockpt.policies.attachment import AttachedForward, Attachment, attached_to, call_inner, place, put_back, take_off
from autockpt.policies.base import ForwardListener, InPlaceError, PlannedUnit, Policy, PolicySession
from autockpt.policies.chunked_loss import ChunkedLossPolicy
from autockpt.policies.chunked_softmax import ChunkedSoftmaxPolicy
from autockpt.policies.compile_budget import CompileBudgetPolicy
from autockpt.policies.compute_ops import draws_random_numbers, is_attention, is_heavy
from autockpt.policies.conflicts import flagged_modules, refuse_lazy, refuse_native, refuse_wrappers
from autockpt.policies.offload import OffloadPolicy
from autockpt.policies.recompute import RecomputePolicy
from autockpt.policies.recompute_offload import RecomputeOffloadPolicy
from autockpt.policies.remake import RemakePolicy
from autockpt.policies.replay import recomputing
from autockpt.policies.save import SavePolicy
from autockpt.policies.saved_outputs import given_up
from autockpt.policies.segment import SegmentPolicy
from autockpt.policies.selective import KeepAttentionPolicy, SelectivePolicy, kept_by
from autockpt.policies.sentinels import FIRST_CALLS, WINDOW, Sentinels

POLICIES: dict[str, Policy] = {
    policy.kind: policy
    for policy in (
        SavePolicy(),
        RecomputePolicy(),
        KeepAttentionPolicy(),
        SelectivePolicy(),
        RemakePolicy(),
        OffloadPolicy(),
        RecomputeOffloadPolicy(),
        SegmentPolicy(),
        ChunkedSoftmaxPolicy(),
        ChunkedLossPolicy(),
        CompileBudgetPolicy(),
    )
}

__all__ = [
    "FIRST_CALLS",
    "POLICIES",
    "WINDOW",
    "AttachedForward",
    "Attachment",
    "ForwardListener",
    "InPlaceError",
    "PlannedUnit",
    "Policy",
    "PolicySession",
    "Sentinels",
    "attached_to",
    "call_inner",
    "draws_random_numbers",
    "flagged_modules",
    "given_up",
    "is_attention",
    "is_heavy",
    "kept_by",
    "place",
    "put_back",
    "recomputing",
    "refuse_lazy",
    "refuse_native",
    "refuse_wrappers",
    "take_off",
]
