"""Comparing a plan's steps with plain training: what they leave behind.

Training under a plan needs none of it. ``apply`` uses it for ``check_batch``, measuring and ``verify`` for whole plans.
"""

from autockpt.verification.gradients import GradientCheck, Reference, compare, judge, observe_reference
from autockpt.verification.observation import (
    Observation,
    coarsest,
    deterministic_algorithms,
    deterministically,
    kept_state,
    observe,
)
