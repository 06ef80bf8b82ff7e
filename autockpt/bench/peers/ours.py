"""autockpt's own plans: one per budget, each found by a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from autockpt.bench.peers.base import OURS, Always, Context, Detach, Setting
from autockpt.runtime import attach
from autockpt.schema import parse_choice


class Ours(Always):
    """Attaches ``setting["choices"]``, as ``autockpt.apply`` would."""

    name: ClassVar[str] = OURS

    def settings(self, context: Context) -> Iterable[Setting]:
        """None: each takes a search, with a worker of its own (``bench.searching``)."""
        return ()

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        return attach(model, {name: parse_choice(choice) for name, choice in setting["choices"].items()}).remove
