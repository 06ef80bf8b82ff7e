"""The recorder of real steps, for what cannot be ghost-run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autockpt.tracing.accumulation import EngineAdds
from autockpt.tracing.operators import count_flops
from autockpt.tracing.recorder import Call, Recorder
from autockpt.tracing.storages import StorageLog


class RealRecorder(Recorder):
    """Records a step whose kernels run, on any device; counts the tensors on ``device`` only."""

    def __init__(self, device: torch.device, engine: EngineAdds | None = None) -> None:
        super().__init__(StorageLog(), engine=engine)
        self._device_type = device.type
        self.on_cpu = device.type == "cpu"
        self.threads = torch.get_num_threads()

    def _run(self, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        result = func(*args, **kwargs)
        if call.operator.flops is not None and not call.flops:
            call.flops = count_flops(call.operator, args, kwargs, result)
        return result

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.device.type == self._device_type
