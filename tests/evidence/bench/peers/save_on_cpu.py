"""Saved tensors in host memory: PyTorch's ``save_on_cpu``, and TRL's ``activation_offloading``."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from autockpt.workload import discover_head
from tests.evidence.bench.peers.base import Context, Detach, Peer, Setting, recomputed, replace_forwards

_POINTLESS = "moves nothing where the device is the CPU itself"


class SaveOnCpu(Peer):
    """Everything that the forward saves goes to pinned host memory and comes back in backward."""

    name = "offload all"

    def missing(self, device_kind: str) -> str:
        return f"save_on_cpu {_POINTLESS}" if device_kind == "cpu" else ""

    def settings(self, context: Context) -> Iterable[Setting]:
        yield Setting("", {"pin_memory": context.workload.device.type == "cuda"})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        return replace_forwards(model, {"": partial(self.run, setting["pin_memory"])})

    @staticmethod
    def run(pin_memory: bool, inner: Any, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=pin_memory):
            return inner(*args, **kwargs)


class InputsOnCpu(SaveOnCpu):
    """Every layer is recomputed, and its input waits in pinned host memory, as Unsloth's checkpointing does it."""

    name = "inputs offloaded"

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        # what a checkpoint holds of its arguments is saved by autograd, outside of the checkpoint's own hooks
        run = partial(self.run, setting["pin_memory"], recomputed)
        return replace_forwards(model, dict.fromkeys(units, run))


class TrlOffload(Peer):
    """``activation_offloading=True`` of TRL's trainers, on streams of its own, alone and with recomputed layers."""

    name = "TRL's offload"

    def missing(self, device_kind: str) -> str:
        if device_kind == "cpu":
            return f"TRL's activation_offloading {_POINTLESS}"
        return "" if find_spec("trl") else "needs trl (pip install trl)"

    def settings(self, context: Context) -> Iterable[Setting]:
        yield Setting("", {"recompute": False})
        yield Setting("and recompute all", {"recompute": True})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        from trl.models.activation_offloading import NoOpManager, OffloadActivations  # type: ignore[import-not-found]

        manager, head = OffloadActivations(), discover_head(model)
        manager.update_model_params(model)

        def offloaded(inner: Any, *args: Any, **kwargs: Any) -> Any:
            manager.__enter__()
            try:
                return inner(*args, **kwargs)
            finally:  # TRL leaves it after the backward, with a wait for all copies: none is lost where there is none
                saved_tensors_hooks.__exit__(manager)

        def saved(inner: Any, *args: Any, **kwargs: Any) -> Any:
            with NoOpManager():
                return inner(*args, **kwargs)

        # TRL's own way to leave the head out is by hooks that cannot be taken off again
        around = {"": offloaded} | ({head.name: saved} if head else {})
        return replace_forwards(model, around | (dict.fromkeys(units, recomputed) if setting["recompute"] else {}))
