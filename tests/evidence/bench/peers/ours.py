"""autockpt's own plans: one per budget, each found by a search; in eager steps and in compiled ones."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from autockpt.measuring.compiler import BACKEND
from autockpt.runtime import attach
from autockpt.schema import CompileMode, parse_choices
from tests.evidence.bench.peers.base import OURS, Context, Detach, Group, Peer, Setting
from tests.evidence.bench.peers.compiled import compiled


class Ours(Peer):
    """Attaches ``setting["choices"]``, as ``autockpt.apply`` would."""

    name = OURS
    compile: ClassVar[CompileMode | None] = None

    def settings(self, context: Context) -> Iterable[Setting]:
        """None: each takes a search, with a worker of its own (``bench.__main__``)."""
        return ()

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        session = attach(model, parse_choices(setting["choices"]))
        session.sentinels.in_mid_training = True
        return session.remove


class OursInCompiledLayers(Ours):
    """A plan of ``autockpt search --compile layers``: every layer is compiled in place.

    Its searches compile for minutes, so it takes part only where it is named.
    """

    name = f"{OURS} compiled layers"
    group: ClassVar[Group] = "compiled"
    exact: ClassVar[bool] = False
    by_name_only: ClassVar[bool] = True
    compile: ClassVar[CompileMode | None] = "layers"

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        assert self.compile is not None
        return compiled(
            model, self.name, self.compile, parse_choices(setting["choices"]), setting.get("backend", BACKEND)
        )


class OursInCompiledModel(OursInCompiledLayers):
    """A plan of ``autockpt search --compile model``: the whole model is compiled as one."""

    name = f"{OURS} compiled model"
    compile: ClassVar[CompileMode | None] = "model"
