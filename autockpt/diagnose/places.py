"""Stages of training in words."""

from __future__ import annotations

from autockpt.schema.diagnosis import Stage

STAGES: dict[Stage, str] = {
    "loading": "while the model was loaded",
    "batch": "while a batch was moved to the device",
    "forward": "in the forward pass",
    "loss": "at the logits and the loss",
    "backward": "in the backward pass",
    "recompute": "in the backward pass, where a layer runs again",
    "optimizer": "in the optimizer step",
    "evaluation": "in evaluation",
    "unknown": "at a place that the stack does not tell",
}
