"""Where the bytes of a step go, why a plan does what it does, and what the rules of thumb are worth on a model."""

from autockpt.explain.build import explain
from autockpt.explain.rules import rules
from autockpt.explain.subject import Question

__all__ = ["Question", "explain", "rules"]
