"""What a unit's forward reads and changes beside its arguments, for running it again: restored, and put back after."""

from autockpt.policies.rerun_state.code import Code
from autockpt.policies.rerun_state.conditions import Conditions, random_states_kept, under, user_modes
from autockpt.policies.rerun_state.reach import code_known, code_of
from autockpt.policies.rerun_state.state import Memory, UnitState
from autockpt.policies.rerun_state.structure import UnitStructure
from autockpt.policies.rerun_state.surroundings import Surroundings

__all__ = [
    "Code",
    "Conditions",
    "Memory",
    "Surroundings",
    "UnitState",
    "UnitStructure",
    "code_known",
    "code_of",
    "random_states_kept",
    "under",
    "user_modes",
]
