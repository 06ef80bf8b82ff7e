"""A module whose calls go by recipes, without a plan."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.recorded_call import RecordedCall, RecordedUnit


class Watching(TorchDispatchMode):
    """Hands every op to a recorder."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.run(func, args, kwargs or {})


class Recorded(nn.Module):
    """Runs a layer by recipes."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer = layer
        self.unit = RecordedUnit("layer", layer, Watching, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return RecordedCall(self.unit, args, kwargs).run(self.layer, args, kwargs)
