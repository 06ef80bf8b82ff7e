"""What PyTorch's SAC tools estimate of a workload: module by module, under fake tensors."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autockpt.runtime.session import without_kv_cache
from autockpt.workload import Workload

MODE = "operator-level-benchmark"


@dataclass(frozen=True)
class Estimate:
    """The graph of modules that the integer program reads, its own estimate of the peak in bytes, and ops by module."""

    graph: Any
    peak_bytes: int
    stats: dict[str, Any]
    root: str

    def module_name(self, full_name: str) -> str:
        """A module's name in the model; theirs begin with the root's class."""
        return full_name.removeprefix(self.root).removeprefix(".")


def estimate(workload: Workload) -> Estimate:
    """Run the estimators on a fake copy of the model. Whatever they raise is passed on."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, get_peak_memory_runtime_baseline, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.utils._pytree import tree_map_only

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _host_clock(workload.device), contextlib.redirect_stdout(io.StringIO()):
        model = fake_copy(workload.model, mode)
        batch = tree_map_only(torch.Tensor, mode.from_tensor, workload.batch)

        def forward() -> torch.Tensor:
            return workload.step(model, batch)

        with without_kv_cache(model):
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
        ops.pwlf_sac_tradeoff_curve(n_segments=2, save_tradeoff_graphs=False)
        _forget_modules_without_backward(memory, times, ops)
        graph = parse_module_info(aggregate_stats(model, memory, times, ops, workload.device))
    peak, _ = get_peak_memory_runtime_baseline(graph)
    return Estimate(graph, int(peak), ops.sac_mod_stats, type(model).__name__)


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """The model with fake tensors for parameters and buffers; nothing of their size is allocated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach(), static_shapes=True)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer, static_shapes=True)
    return copy.deepcopy(model, memo)


def _forget_modules_without_backward(memory: Any, times: Any, ops: Any) -> None:
    """Leave out modules that take no part in backward (rotary tables, frozen parts): the tools fail with a KeyError."""
    from torch.distributed._tools.mem_tracker import _ModState

    needed = {_ModState.PRE_BW, _ModState.PEAK_BW, _ModState.POST_FW}
    without = {m: s.mod_fqn for m, s in memory.memory_tracking.items() if not needed <= set(s.snapshots)}
    names = set(without.values())
    for module in without:
        del memory.memory_tracking[module]
    for order in ("mod_fw_pre_order", "mod_bw_pre_order", "mod_fw_post_order", "mod_bw_post_order"):
        setattr(times, order, [name for name in getattr(times, order) if name not in names])
    for name in names:
        ops.sac_mod_tradeoff_stats.pop(name, None)
        ops.sac_mod_stats.pop(name, None)


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
    none = {"current_stream": lambda *_: None, "synchronize": lambda *_: None}
    # which of them it asks depends on the version: torch.cuda up to 2.13, torch and torch.accelerator by 2.15
    stands_in = [
        (module, name, value)
        for module, values in (
            (torch.cuda, none | {"Event": _Event}),
            (torch.accelerator, none),
            (torch, {"Event": _Event}),
        )
        for name, value in values.items()
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in stands_in]
    try:
        for module, name, value in stands_in:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
