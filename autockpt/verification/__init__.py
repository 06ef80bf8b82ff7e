"""Comparing a plan's steps with plain training: what they leave behind.

Training under a plan needs none of it: measuring and ``verify`` use it.
"""

from autockpt.verification.gradients import GradientCheck, Reference, judge, observe_reference
from autockpt.verification.observation import (
    Observation,
    coarsest,
    deterministic_algorithms,
    deterministically,
    kept_state,
    observe,
)
