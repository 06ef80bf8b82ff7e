"""What a peer is: one way to train within less memory, with the settings that it offers for a workload."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple
from unittest.mock import patch

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autockpt.measuring.compiler import missing as compiler_missing
from autockpt.runtime.session import without_kv_cache
from autockpt.schema import Unit
from autockpt.workload import Step
from autockpt.workload.units import module_of, unwrap

PLAIN = "save everything"
OURS = "autockpt"
Detach = Callable[[], None]
Group = Literal["eager", "compiled"]


class Setting(NamedTuple):
    """One way to set a peer: ``label`` is for people and unique within the peer, ``data`` is JSON for ``attach``."""

    label: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What a peer may know when it makes its settings.

    ``units`` are the model's blocks in order, ``budgets`` the budgets in bytes by their text; ``plain_peak`` is the
    measured peak of saving everything in bytes, None where that does not fit.
    """

    workload: Step
    units: Sequence[Unit]
    budgets: Mapping[str, int]
    plain_peak: int | None


class Peer:
    """One way of doing it, the way its own documentation says.

    ``exact``: gradients are those of plain training bit for bit, else within rounding. ``group``: rows are timed
    together but judged within their group only. ``by_name_only``: not among those that take part where none is named.
    """

    name: str
    group: ClassVar[Group] = "eager"
    exact: ClassVar[bool] = True
    by_name_only: ClassVar[bool] = False

    def missing(self, device_kind: str) -> str:
        """Why this peer cannot run here (a package, a compiler), in one line; empty where nothing is known."""
        return compiler_missing(device_kind) if self.group == "compiled" else ""

    def settings(self, context: Context) -> Iterable[Setting]:
        """Every setting worth a row. May run and time ops; leaves the model as it was."""
        raise NotImplementedError

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        """Attach a setting to a live model. ``units`` are the names of its blocks. What is returned takes it off."""
        raise NotImplementedError


def replace_forwards(model: nn.Module, wrapped: Mapping[str, Callable[..., Any] | None]) -> Detach:
    """Put ``function(inner_forward, *args, **kwargs)`` in the place of the named modules' forwards.

    "" is the model itself; None leaves a module alone. The KV cache is off, as it is under a plan of ours: a layer that
    runs again would add to it twice. What is returned restores all, in reverse.
    """
    with ExitStack() as stack:
        stack.callback(without_kv_cache(model).remove)
        for name, function in wrapped.items():
            if function is not None:
                module = unwrap(module_of(model, name)) if name else unwrap(model)
                stack.enter_context(patch.object(module, "forward", partial(function, module.forward)))
        return stack.pop_all().close


def recomputed(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own activation checkpointing, as it is recommended: non-reentrant, random state preserved."""
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def recomputed_but(policy: Callable[[], Callable[..., CheckpointPolicy]]) -> Callable[..., Any]:
    """PyTorch's selective activation checkpointing; ``policy`` makes what decides, op by op, in one call."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy())

    return partial(checkpoint, use_reentrant=False, context_fn=contexts)
