"""Checkpointing of one module's calls: what happens between a forward and its backward. Knows no plan and no choice.

Read ``frame`` first: one call of a unit. ``arguments`` holds what the call was given, ``replay_context`` and
``autocast`` what it ran under, ``module_state`` what its modules hold and change, ``unit`` what all calls of a unit
have in common.
"""

from autockpt.checkpointing.frame import CheckpointFrame as CheckpointFrame
from autockpt.checkpointing.unit import CheckpointedUnit as CheckpointedUnit
