"""From an out-of-memory failure to a prescription: what the run said, what filled the device, and what would fit."""

from autockpt.diagnose.build import DiagnoseRequest, diagnose
from autockpt.diagnose.oom_log import read_log
