"""torch_remat (Meta): a layer runs again but for regions of its source, whose saved tensors are kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from autockpt.workload.units import module_of
from tests.evidence.bench.peers.base import Context, Detach, Peer, Setting, replace_forwards

ATTENTION = "scaled_dot_product_attention"
KEEP = {  # linear layers by the end of their names; None: all
    "attention": (),
    "attention and its projections": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "attention and all products": None,
}


class Remat(Peer):
    """Every layer is one checkpoint; attention and some of its linear layers are regions that do not run again."""

    name = "torch_remat"

    def missing(self, device_kind: str) -> str:
        return "" if find_spec("torch_remat") else "needs torch_remat (pip install torch_remat)"

    def settings(self, context: Context) -> Iterable[Setting]:
        for label, ends in KEEP.items():
            yield Setting(label, {"keep": ends})

    def attach(self, model: nn.Module, units: Sequence[str], setting: Mapping[str, Any]) -> Detach:
        ends = setting["keep"]
        wrapped: dict[str, Callable[..., Any]] = {name: partial(checkpointed, name) for name in units}
        for name in units:
            for inner, module in module_of(model, name).named_modules():
                if isinstance(module, nn.Linear) and (ends is None or inner.endswith(tuple(ends))):
                    wrapped[f"{name}.{inner}"] = partial(kept, inner)
        with ExitStack() as stack:
            stack.callback(replace_forwards(model, wrapped))
            stack.enter_context(
                patch.object(functional, ATTENTION, partial(kept, ATTENTION, functional.__dict__[ATTENTION]))
            )
            return stack.pop_all().close


def checkpointed(name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch_remat  # type: ignore[import-not-found]

    return torch_remat.checkpoint(region_name=name)(inner)(*args, **kwargs)


def kept(name: str, inner: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    import torch_remat  # type: ignore[import-not-found]

    output = torch_remat.region(inner, name, recompute=False)(*args, **kwargs)
    torch_remat.recompute_needs_tensor(output)
    return output
