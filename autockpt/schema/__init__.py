"""The data objects that the stages hand to one another: frozen, versioned, without torch."""

from autockpt.schema.base import Data
from autockpt.schema.choices import (
    CHOICE_TYPES,
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    KeepAttention,
    Offload,
    Recompute,
    RecomputeOffload,
    Remake,
    Save,
    Segment,
    Selective,
    choice_kinds,
    dump_choice,
    dump_choices,
    from_label,
    label,
    parse_choice,
    parse_choices,
    searched_kinds,
)
from autockpt.schema.device import DeviceInfo, Environment
from autockpt.schema.estimate import Estimate
from autockpt.schema.graph import PHASES, Copy, Graph, Op, Phase, Storage, StorageKind, TensorMeta, Unit, UnitRole
from autockpt.schema.hardware import Efficiency, Hardware
from autockpt.schema.memory import DevicePeak
from autockpt.schema.names import strip_prefixes
from autockpt.schema.plan import Comparison, CompileMode, Plan, PlanStatus, Structure, Verdict, plan_hash
from autockpt.schema.problem import (
    Assignment,
    Option,
    Point,
    Problem,
    UnitOptions,
    host_of,
    option_of,
    peak_of,
    seconds_of,
)
from autockpt.schema.profile import Menu, MenuItem, OpTimes, Profile
from autockpt.schema.request import (
    FinishedSearch,
    Listener,
    SearchOptions,
    SearchOutcome,
    SearchRequest,
    Silence,
    StageTime,
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
from autockpt.schema.space import Knob, SearchSpace
from autockpt.schema.trial import Measurement, Prediction, Trial, TrialState
from autockpt.schema.verification import Check, CheckState, VerifyReport
from autockpt.schema.workload import Dtype, OptimizerName, WorkloadSpec
