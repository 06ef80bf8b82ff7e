"""All saved tensors in host memory, by ``torch.autograd.graph.save_on_cpu``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from tests.evidence.bench.peers.base import Context, Detach, Peer, Setting, replace_forwards


class SaveOnCpu(Peer):
    """Everything that the forward saves goes to pinned host memory and comes back in backward."""

    name = "offload all"

    def missing(self, device_kind: str) -> str:
        return "save_on_cpu moves nothing where the device is the CPU itself" if device_kind == "cpu" else ""

    def settings(self, context: Context) -> Iterable[Setting]:
        yield Setting("", {"pin_memory": context.workload.device.type == "cuda"})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        def run(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with save_on_cpu(pin_memory=setting["pin_memory"]):
                return inner(*args, **kwargs)

        return replace_forwards(model, {"": run})
