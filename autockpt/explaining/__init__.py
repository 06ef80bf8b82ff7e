"""Where the bytes of a step go, and why a plan does what it does."""

from autockpt.explaining.build import explain
from autockpt.explaining.subject import ExplainRequest
