"""Measure real steps: ``WorkerMeasurer`` in a process of its own, ``LocalMeasurer`` in this one, ``Ranks`` on all
ranks.

Each of them drives a ``StepRunner``, which attaches a plan to a workload and measures it.
"""

from autockpt.measuring.base import Measurer
from autockpt.measuring.client import WorkerMeasurer
from autockpt.measuring.environment import environment_of
from autockpt.measuring.local import LocalMeasurer
from autockpt.measuring.ranks import Ranks
from autockpt.measuring.runner import StepRunner
