"""Whole layers by a rule of thumb: save all, recompute all, every n-th, the first k."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from autockpt.bench.peers.base import PLAIN, Context, Detach, Peer, Setting, recomputed, replace_forwards
from autockpt.profiling.fronts import spread

MOST = 16  # settings of one rule: deeper models get that many, evenly spread


class ByLayer(Peer):
    """Recomputes the units whose positions ``setting["recompute"]`` lists."""

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        positions: list[int] = setting["recompute"]
        return replace_forwards(model, dict.fromkeys((units[i] for i in positions), recomputed))


class Plain(ByLayer):
    """Plain training: every activation is saved. What all others are compared with."""

    name: ClassVar[str] = PLAIN

    def settings(self, context: Context) -> Iterable[Setting]:
        yield Setting("", {"recompute": []})


class RecomputeAll(ByLayer):
    """Every layer is recomputed, as ``gradient_checkpointing=True`` of a Trainer does."""

    name: ClassVar[str] = "recompute all"

    def settings(self, context: Context) -> Iterable[Setting]:
        yield Setting("", {"recompute": list(range(len(context.units)))})


class EveryNth(ByLayer):
    """Layers 0, n, 2n, … are recomputed, as transformers' ``every_n_layers`` does."""

    name: ClassVar[str] = "every-n"

    def settings(self, context: Context) -> Iterable[Setting]:
        n_units = len(context.units)
        for n in spread(range(2, n_units), MOST):
            yield Setting(str(n), {"recompute": list(range(0, n_units, n))})


class FirstK(ByLayer):
    """The first k layers are recomputed: at the same number of layers a lower peak than any other."""

    name: ClassVar[str] = "first-k"

    def settings(self, context: Context) -> Iterable[Setting]:
        for k in spread(range(1, len(context.units)), MOST):
            yield Setting(str(k), {"recompute": list(range(k))})
