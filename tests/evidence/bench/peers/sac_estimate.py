"""What PyTorch's SAC tools estimate of a workload: module by module, under fake tensors."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autockpt.runtime.session import without_kv_cache
from autockpt.workload import Step

MODE = "operator-level-benchmark"


@dataclass(frozen=True)
class SacEstimate:
    """The graph of modules that the integer program reads, its own estimate of the peak in bytes, and ops by module."""

    graph: Any
    peak_bytes: int
    stats: dict[str, Any]
    root: str

    def module_name(self, full_name: str) -> str:
        """A module's name in the model; theirs begin with the root's class."""
        return full_name.removeprefix(self.root).removeprefix(".")


def estimate(workload: Step) -> SacEstimate:
    """Run the estimators on a fake copy of the model. Whatever they raise is passed on."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, get_peak_memory_runtime_baseline, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _host_clock(workload.device), _mended_ops(), contextlib.redirect_stdout(io.StringIO()):
        model = fake_copy(workload.model, mode)
        batch = tree_map_only(torch.Tensor, mode.from_tensor, workload.batch)

        def forward() -> torch.Tensor:
            assert workload.loss is not None
            return workload.loss(model, batch)

        alive: list[nn.Module] = []  # a forward may make modules on the fly (a loss), which the tools hold weakly
        keeping = nn.modules.module.register_module_forward_pre_hook(lambda module, args: alive.append(module))
        with without_kv_cache(model), keeping:
            memory = MemTracker()
            memory.track_external(model)
            with memory:
                for first in (True, False):
                    forward().backward()
                    if first:
                        memory.reset_mod_stats()
                    model.zero_grad(set_to_none=True)
            times = RuntimeEstimator()
            with times(estimate_mode_type=MODE):
                forward().backward()
            model.zero_grad(set_to_none=True)
            ops = SACEstimator()
            with ops(estimate_mode_type=MODE):
                loss = forward()
            loss.backward()
        _forget_modules_without_curve(ops)
        _forget_modules_without_backward(model, memory, times, ops)
        graph = parse_module_info(aggregate_stats(model, memory, times, ops, workload.device))
    peak, _ = get_peak_memory_runtime_baseline(graph)
    return SacEstimate(graph, int(peak), ops.sac_mod_stats, type(model).__name__)


def _forget_modules_without_curve(ops: Any) -> None:
    """Fit the curves of bytes against seconds; leave out modules that have none, on which the tools fail.

    Those that keep nothing (dropout switched off) are divided by; a curve of one point has a slope of nan.
    """
    for name in [n for n, stats in ops.sac_mod_stats.items() if not sum(stats.memory)]:
        del ops.sac_mod_stats[name]
    ops.pwlf_sac_tradeoff_curve(n_segments=2, save_tradeoff_graphs=False)
    for name in [n for n, fit in ops.sac_mod_tradeoff_stats.items() if not all(map(math.isfinite, fit.slopes))]:
        del ops.sac_mod_stats[name], ops.sac_mod_tradeoff_stats[name]


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """The model with fake tensors for parameters and buffers; nothing of their size is allocated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach(), static_shapes=True)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer, static_shapes=True)
    return copy.deepcopy(model, memo)


def _forget_modules_without_backward(model: nn.Module, memory: Any, times: Any, ops: Any) -> None:
    """Leave out modules that take no part in backward (rotary tables, frozen parts) or are none of the model's.

    The tools fail on either, with a KeyError and an AssertionError.
    """
    from torch.distributed._tools.mem_tracker import _ModState

    needed = {_ModState.PRE_BW, _ModState.PEAK_BW, _ModState.POST_FW}
    without = {m: s.mod_fqn for m, s in memory.memory_tracking.items() if not needed <= set(s.snapshots)}
    for module in without:
        del memory.memory_tracking[module]
    known = {memory.memory_tracking[m].mod_fqn for m in model.modules() if m in memory.memory_tracking}
    names = (set(times.mod_fw_pre_order) | set(without.values())) - known
    for order in ("mod_fw_pre_order", "mod_bw_pre_order", "mod_fw_post_order", "mod_bw_post_order"):
        once = dict.fromkeys(getattr(times, order))  # a module may run twice in a forward, but is one
        setattr(times, order, [name for name in once if name not in names])
    for name in names:
        ops.sac_mod_tradeoff_stats.pop(name, None)
        ops.sac_mod_stats.pop(name, None)


class _Timed:
    """Stands in for an op that is to be timed. The estimator makes up what it runs on: random floats, integers of one.

    Ones for the ends of groups would leave all groups but one empty, and one is no index into a dimension of size 1.
    """

    def __init__(self, op: Any) -> None:
        self._op = op
        self.tags, self._overloadpacket = op.tags, op._overloadpacket

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._op is _grouped_mm() and len(given) > 2 and given[2] is not None:
            return self._op(*given[:2], _even_ends(*given[:3]), *given[3:], **named)
        if self._overloadpacket.__name__ in _INDEXING:
            given = tree_map_only(torch.Tensor, _first_place, given)
        return self._op(*given, **named)


_INDEXING = {"index", "index_put", "index_put_", "index_select", "gather", "scatter", "scatter_add", "embedding"}


def _grouped_mm() -> Any:
    return torch.ops.aten._grouped_mm.default


def _even_ends(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows spread evenly over the groups of a grouped product."""
    rows = second.shape[-1] if first.dim() == 3 else first.shape[-1 if second.dim() == 2 else 0]
    groups = ends.numel()
    return torch.tensor([rows * (i + 1) // groups for i in range(groups)], dtype=ends.dtype, device=ends.device)


def _first_place(values: torch.Tensor) -> torch.Tensor:
    """Zeros where these are indices."""
    return torch.zeros_like(values) if values.dtype in (torch.int64, torch.int32) else values


@contextlib.contextmanager
def _mended_ops() -> Iterator[None]:
    """Has ops timed on values that they take, and lets fake tensors of every type through grouped products (experts).

    Kernels take fp32 there, too; the op's shape function refuses all but bf16.
    """
    from torch._meta_registrations import _create_grouped_mm_output_tensor
    from torch._subclasses.fake_impls import op_implementations_dict
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    name = "_maybe_run_and_benchmark_fallback_kernel"
    timed = RuntimeEstimator.__dict__[name]

    def shape(mode: Any, func: Any, first: Any, second: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None):
        with mode:
            return _create_grouped_mm_output_tensor(first, second, offs, out_dtype)

    def mended(cls: Any, func: Any, *given: Any) -> Any:
        return timed.__func__(cls, _Timed(func), *given)

    patched = patch.object(RuntimeEstimator, name, classmethod(mended))
    with patch.dict(op_implementations_dict, {_grouped_mm(): shape}), patched:
        yield


class _Event:
    """What the runtime estimator needs of a device's event, read off the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end.seconds - self.seconds) * 1e3


@contextlib.contextmanager
def _host_clock(device: torch.device) -> Iterator[None]:
    """Lets the runtime estimator, which times ops by a device's events only, run on a device without them."""
    if device.type == "cuda":
        yield
        return
    none: dict[str, Any] = {"current_stream": lambda *_: None, "synchronize": lambda *_: None}
    # which of them it asks depends on the version: torch.cuda up to 2.13, torch and torch.accelerator by 2.15
    with (
        patch.multiple(torch.cuda, Event=_Event, **none),
        patch.multiple(torch.accelerator, **none),
        patch.object(torch, "Event", _Event),
    ):
        yield
