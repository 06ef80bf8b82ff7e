"""The data objects that the packages exchange and that files hold: frozen, validated, without torch."""

from autockpt.schema.base import Data
from autockpt.schema.choices import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    Offload,
    RecomputeOffload,
    Remake,
    SearchSpace,
    Segment,
    Selective,
    dump_choices,
    parse_choice,
    parse_choices,
)
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.graph import Graph, Op, Phase, Storage, StorageKind, Unit
from autockpt.schema.hardware import Hardware
from autockpt.schema.plan import Comparison, CompileMode, Plan, PlanStatus, Verdict, plan_hash
from autockpt.schema.profile import Menu, OpTimes, Profile
from autockpt.schema.request import (
    Estimate,
    FinishedSearch,
    Listener,
    SearchOutcome,
    SearchRequest,
    Silence,
    question_hash,
)
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
from autockpt.schema.trial import Measurement, Prediction, Trial, TrialState
from autockpt.schema.workload import WorkloadSpec
