"""Applying choices to a live model, and taking them off again."""

from autockpt.policies.sketches import coarsest, coarsest_type, sketch
from autockpt.runtime.apply import Handle, apply, choices_for
from autockpt.runtime.gradients import GradientCheck, Reference, compare, judge, observe_reference
from autockpt.runtime.observation import (
    Observation,
    deterministic_algorithms,
    deterministically,
    digest_tensors,
    kept_state,
    observe,
)
from autockpt.runtime.proving import Proof
from autockpt.runtime.reruns import RunCounter, UnitRuns
from autockpt.runtime.session import Session, attach, attached_path, remove, without_kv_cache
