"""Other projects' losses, which never hold the logits of all tokens: what any rule for layers can be combined with."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tests.evidence.bench.peers.base import Detach


def liger(model: Any) -> Detach:
    """Liger Kernel's fused linear cross-entropy, and none of its other kernels."""
    from liger_kernel.transformers.monkey_patch import (  # type: ignore[import-not-found]
        MODEL_TYPE_TO_APPLY_LIGER_FN,
    )

    others = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
    MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type](model=model, fused_linear_cross_entropy=True, **others)
    return partial(model.__dict__.pop, "forward")


def trl(model: Any) -> Detach:
    """The fused head with which TRL's ``SFTTrainer`` computes its loss."""
    from trl.trainer.utils import add_fused_lm_head  # type: ignore[import-not-found]

    add_fused_lm_head(model)
    model.forward = partial(model.forward, fused_lm_head=True)
    return partial(model.__dict__.pop, "forward")


LOSSES: dict[str, Callable[[nn.Module], Detach]] = {"Liger's loss": liger, "TRL's loss": trl}
