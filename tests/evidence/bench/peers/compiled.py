"""torch.compile of the whole model, with the partitioner's ``activation_memory_budget``."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

from torch import nn

from autockpt.errors import ConflictError
from autockpt.measuring.compiler import BACKEND, Compiler
from autockpt.runtime import Session, attach, without_kv_cache
from autockpt.schema import Choice, CompileMode, plan_hash
from autockpt.workload.units import module_of, unwrap
from tests.evidence.bench.peers.base import Context, Detach, Group, Peer, Setting, recomputed

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)

# model -> (peer, how, backend, budget) -> what compiles it, so that a turn after the first finds it compiled
_Key = tuple[str, CompileMode, str, float]
_sessions: weakref.WeakKeyDictionary[nn.Module, dict[Any, Session]] = weakref.WeakKeyDictionary()
_compilers: weakref.WeakKeyDictionary[nn.Module, dict[_Key, Compiler]] = weakref.WeakKeyDictionary()
# layer -> its forward under recompute: another function every turn would be compiled again every turn
_recomputed: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


class MemoryBudget(Peer):
    """The model compiled as one; 1.0 is what ``torch.compile`` does by itself.

    A budget is a share of the bytes that the compiled graph would save, not a peak. Gradients are equal up to rounding.
    """

    name = "torch.compile"
    group: ClassVar[Group] = "compiled"
    exact: ClassVar[bool] = False

    def settings(self, context: Context) -> Iterable[Setting]:
        for budget in BUDGETS:
            yield Setting(f"{budget:g}", {"budget": budget, "backend": BACKEND})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        return compiled(model, self.name, "model", None, setting["backend"], setting["budget"])


class RecomputeAllCompiled(MemoryBudget):
    """Every layer is recomputed, as ``gradient_checkpointing=True`` of a Trainer does, and the model compiled."""

    name = "recompute all compiled"

    def settings(self, context: Context) -> Iterable[Setting]:
        yield Setting("", {"backend": BACKEND})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        with ExitStack() as stack:
            for layer in (unwrap(module_of(model, name)) for name in units):
                if "forward" in layer.__dict__:
                    raise ConflictError(
                        "a layer has a forward of its own on the instance, which would be left out here"
                    )
                forward = _recomputed.setdefault(layer, partial(recomputed, layer.forward))
                stack.enter_context(patch.object(layer, "forward", forward))
            stack.callback(compiled(model, self.name, "model", None, setting["backend"]))
            return stack.pop_all().close


def compiled(
    model: nn.Module,
    peer: str,
    mode: CompileMode,
    choices: Mapping[str, Choice] | None,
    backend: str,
    budget: float = 1.0,
) -> Detach:
    """Attach a plan (None: plain training) and compile the model's calls, under ``activation_memory_budget``.

    What is returned takes both off; what was compiled is kept for the peer's next turn.
    """
    from torch._functorch import config

    known = _compilers.setdefault(model, {})
    if (key := (peer, mode, backend, budget)) not in known:
        known[key] = Compiler(mode, next(model.parameters()).device.type, backend=backend)
    with ExitStack() as stack:
        # The budget is read while compiling, and the backward is compiled only when it first runs: it holds throughout.
        stack.enter_context(config.patch(activation_memory_budget=budget))
        stack.enter_context(_attached(model, key, choices))
        stack.enter_context(known[key].compiling(model, choices or {}))
        return stack.pop_all().close


def _attached(model: nn.Module, key: _Key, choices: Mapping[str, Choice] | None) -> AbstractContextManager[Session]:
    """Choices attached by the same objects every time: compiled code belongs to them."""
    known = _sessions.setdefault(model, {})
    plan = (*key, "plain" if choices is None else plan_hash(choices))
    if plan not in known:
        known[plan] = without_kv_cache(model) if choices is None else attach(model, choices)
        known[plan].sentinels.in_mid_training = True
        known[plan].remove()
    return known[plan].reattach()


def compile_seconds(model: nn.Module) -> float:
    """Seconds that compiling took so far, for all rows of this model."""
    return sum(compiler.seconds for compiler in _compilers.get(model, {}).values())
