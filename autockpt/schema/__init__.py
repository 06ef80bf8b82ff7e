"""The data objects that the stages hand to one another: frozen, versioned, without torch."""

from autockpt.schema.base import Data
from autockpt.schema.choices import (
    CHOICE_TYPES,
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    Offload,
    Recompute,
    Save,
    choice_kinds,
    dump_choice,
    parse_choice,
)
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.graph import PHASES, Copy, Graph, Op, Phase, Storage, TensorMeta, Unit, UnitRole
from autockpt.schema.names import strip_prefixes
from autockpt.schema.plan import Comparison, Plan, PlanStatus, Structure, Verdict, plan_hash
from autockpt.schema.problem import Assignment, Option, Point, Problem, UnitOptions, option_of, peak_of, seconds_of
from autockpt.schema.profile import Menu, MenuItem, OpTimes, Profile
from autockpt.schema.request import Listener, SearchOutcome, SearchRequest, Silence, StageTime, question_hash
from autockpt.schema.sizes import (
    Budget,
    ResolvedBudget,
    covers,
    format_binary,
    format_bytes,
    format_decimal,
    parse_budget,
    parse_size,
)
from autockpt.schema.space import Knob, SearchSpace, load_space
from autockpt.schema.trial import Measurement, Prediction, Trial, TrialState
from autockpt.schema.verification import Check, CheckState, VerifyReport
from autockpt.schema.workload import Dtype, OptimizerName, WorkloadSpec

__all__ = [
    "CHOICE_TYPES",
    "OFFLOAD",
    "PHASES",
    "RECOMPUTE",
    "SAVE",
    "Assignment",
    "Budget",
    "Check",
    "CheckState",
    "Choice",
    "Comparison",
    "Copy",
    "Data",
    "DeviceInfo",
    "Dtype",
    "Environment",
    "Graph",
    "Knob",
    "Listener",
    "Measurement",
    "Menu",
    "MenuItem",
    "Offload",
    "Op",
    "OpTimes",
    "OptimizerName",
    "Option",
    "Phase",
    "Plan",
    "PlanStatus",
    "Point",
    "Prediction",
    "Problem",
    "Profile",
    "Recompute",
    "ResolvedBudget",
    "Save",
    "SearchOutcome",
    "SearchRequest",
    "SearchSpace",
    "Silence",
    "StageTime",
    "Storage",
    "Structure",
    "TensorMeta",
    "Trial",
    "TrialState",
    "Unit",
    "UnitOptions",
    "UnitRole",
    "Verdict",
    "VerifyReport",
    "WorkloadSpec",
    "choice_kinds",
    "covers",
    "dump_choice",
    "format_binary",
    "format_bytes",
    "format_decimal",
    "load_space",
    "option_of",
    "parse_budget",
    "parse_choice",
    "parse_size",
    "peak_of",
    "plan_hash",
    "question_hash",
    "seconds_of",
    "strip_prefixes",
]
