"""Where the bytes of a step go, why a plan does what it does, and how well the rules of thumb hold on a model."""

from autockpt.explaining.build import explain
from autockpt.explaining.rules import rules
from autockpt.explaining.subject import ExplainRequest
