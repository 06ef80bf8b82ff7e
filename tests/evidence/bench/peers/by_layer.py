"""Whole layers by a rule of thumb: save all, recompute all, every n-th, the first k."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from autockpt.cost.fronts import spread
from tests.evidence.bench.peers.base import PLAIN, Context, Detach, Peer, Setting, recomputed, replace_forwards

MOST = 16  # settings of one rule: deeper models get that many, evenly spread


class ByLayer(Peer):
    """A rule for which layers are recomputed: of so many, for each of its settings, a label and their positions."""

    def __init__(self, name: str, rule: Callable[[int], Iterable[tuple[str, range]]]) -> None:
        self.name, self.rule = name, rule

    def settings(self, context: Context) -> Iterable[Setting]:
        for label, positions in self.rule(len(context.units)):
            yield Setting(label, {"recompute": list(positions)})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        positions: list[int] = setting["recompute"]
        return replace_forwards(model, dict.fromkeys((units[i] for i in positions), recomputed))


BY_LAYER = (
    # plain training: every activation is saved; what all others are compared with
    ByLayer(PLAIN, lambda count: [("", range(0))]),
    # as `gradient_checkpointing=True` of a Trainer does
    ByLayer("recompute all", lambda count: [("", range(count))]),
    # layers 0, n, 2n, …, as transformers' `every_n_layers` does
    ByLayer("every-n", lambda count: ((str(n), range(0, count, n)) for n in spread(range(2, count), MOST))),
    # at the same number of layers a lower peak than any other
    ByLayer("first-k", lambda count: ((str(k), range(k)) for k in spread(range(1, count), MOST))),
)
