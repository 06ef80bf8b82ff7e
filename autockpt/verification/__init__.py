"""Compare the state after steps under a plan with that after plain training.

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
