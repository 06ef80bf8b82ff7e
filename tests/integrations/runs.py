"""How often a layer runs while a trainer trains."""

import logging
from typing import Any

import torch
from torch import nn

from autockpt.checkpointing.replay_context import recomputing
from autockpt.policies.base import attached_to


class Runs(logging.Filter):
    """How often a model's first layer ran with gradients, without any (with a cache: too), and again in backward.

    What is a logger's is no state of the model, so a second run does not put it back.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trained = self.looked = self.cached = self.again = 0
        layer = next(m for n, m in model.named_modules() if n.endswith("model.layers.0"))
        layer.self_attn.register_forward_pre_hook(self._ran, with_kwargs=True)

    def _ran(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if recomputing() is not None:
            self.again += 1
        elif torch.is_grad_enabled():
            self.trained += 1
        else:
            self.looked += 1
            self.cached += kwargs.get("past_key_values") is not None


def untouched(model: nn.Module) -> bool:
    return not any(attached_to(m) for m in model.modules())
