"""Measure real steps, in a worker process or in the user's own."""

from autockpt.measuring.base import Measurer
from autockpt.measuring.client import WorkerMeasurer
from autockpt.measuring.environment import environment_of
from autockpt.measuring.local import LocalMeasurer
from autockpt.measuring.ranks import Ranks
from autockpt.measuring.runner import StepRunner
