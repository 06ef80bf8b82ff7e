"""PyTorch's automatic selective activation checkpointing (``torch.distributed._tools.sac_ilp``), made to run at all.

Its parts estimate a step under fake tensors and solve an integer program for what each module should keep; nothing in
PyTorch applies the answer, and estimating works on CUDA devices only. Here it gets a clock for other devices, a fake
copy of the model, and an applier.
"""

import contextlib
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from autockpt.errors import MeasurementError
from tests.evidence.bench.peers.base import Context, Detach, Peer, Setting, recomputed, recomputed_but, replace_forwards
from tests.evidence.bench.peers.sac_estimate import SacEstimate, estimate

# Its peak is its own estimate and what it finds may lie over the budget: it is asked for less, too, in these steps.
LOWER = (1.0, 0.93, 0.86)


class SacIlp(Peer):
    """For every budget what the integer program answers, asked for that share of its own estimated peak and for less.

    ``setting["modules"]`` maps a module's name to what it keeps: by op name, whether the output of its first, second, …
    call is kept. An empty one keeps nothing.
    """

    name = "torch SAC ILP"

    def missing(self, device_kind: str) -> str:
        absent = [name for name in ("pulp", "pwlf") if find_spec(name) is None]
        return f"needs {' and '.join(absent)} (pip install '.[dev]')" if absent else ""

    def settings(self, context: Context) -> Iterable[Setting]:
        if context.plain_peak is None:
            raise MeasurementError("budgets cannot be carried over to its own estimate: plain training does not fit")
        found = estimate(context.workload)
        seen: list[dict[str, Any]] = []
        for text, size in sorted(context.budgets.items(), key=lambda item: -item[1]):
            for factor in LOWER:
                share = size / context.plain_peak * factor
                modules = answer(found, share)
                if modules is None or modules in seen:
                    continue
                seen.append(modules)
                asked = text if factor == 1 else f"{text} × {factor:g}"
                yield Setting(f"asked for {asked}", {"modules": modules})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        return replace_forwards(model, {name: _runs(keep) for name, keep in setting["modules"].items()})


def answer(found: SacEstimate, share: float) -> dict[str, dict[str, list[int]]] | None:
    """What every module to be recomputed keeps at ``share`` of the estimated peak; None: no solution."""
    import copy

    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

    with contextlib.redirect_stdout(io.StringIO()):
        discards, _, peak = sac_milp(copy.deepcopy(found.graph), memory_budget=found.peak_bytes * share / 2**30)
    if peak < 0:
        return None
    modules: dict[str, dict[str, list[int]]] = {}
    solved: dict[str, dict[str, list[int]]] = {}
    for name, discard in discards.items():
        stats = found.stats[name]
        if discard >= 1:
            modules[found.module_name(name)] = {}
            continue
        key = repr((round(discard, 2), stats.func_names, stats.memory, [round(t, 1) for t in stats.runtimes]))
        if key not in solved:
            kept = get_optimal_checkpointing_policy_per_module(stats, round(1 - discard, 4))
            if len(kept) != len(stats.func_names):
                return None
            # PyTorch refuses to keep what is changed in place later on
            changed = {number for pair in stats.inplace_ops for number in pair}
            by_op: dict[str, list[int]] = defaultdict(list)
            for number, (op, keep) in enumerate(zip(stats.func_names, kept, strict=True)):
                by_op[op].append(keep if number not in changed else 0)
            # ops of which nothing is kept need not be listed
            solved[key] = {op: flags for op, flags in by_op.items() if any(flags)}
        modules[found.module_name(name)] = solved[key]
    return modules


def _runs(keep: Mapping[str, Sequence[int]]) -> Callable[..., Any]:
    return recomputed_but(lambda: policy(keep)) if keep else recomputed


def policy(keep: Mapping[str, Sequence[int]]) -> Callable[..., CheckpointPolicy]:
    """A policy for one call of a module: the k-th call of an op does what the k-th flag of its name says.

    By name and not by position among all ops: fake tensors see other ops than a real step here and there (masks), and
    everything behind them would get another op's flag.
    """
    seen: Counter[tuple[bool, str]] = Counter()

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = getattr(getattr(op, "overloadpacket", op), "__name__", "")
        flags = keep.get(name, ())
        number = seen[context.is_recompute, name]
        seen[context.is_recompute, name] += 1
        kept = number < len(flags) and flags[number]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
