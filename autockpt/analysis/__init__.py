"""Where the bytes of a step go, and why a plan does what it does."""

from autockpt.analysis.build import explain
from autockpt.analysis.subject import ExplainRequest
