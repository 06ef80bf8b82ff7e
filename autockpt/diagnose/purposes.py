"""What a block of a snapshot was for, by the stack that asked for it. Heuristics, stated here and to the reader.

Weights: made while the model was built, loaded or moved. Optimizer: a frame of an optimizer. Backward: a block whose
allocation was recorded without a Python frame, because autograd launches CUDA kernels from a thread of its own that no
Python code called, or a frame of autograd's engine; gradients are among it, and cannot be told from what backward drops
again. Made again: a frame of torch.utils.checkpoint below autograd. Logits and loss, batch: by the functions' names.
All else within a forward call is an activation.
"""

from __future__ import annotations

from collections.abc import Sequence

from autockpt.diagnose.frames import path_of, stage_of
from autockpt.schema.diagnosis import Frame, Stage

WEIGHTS, OPTIMIZER, BACKWARD, AGAIN = "weights", "optimizer", "gradients and backward", "made again for backward"
ACTIVATIONS, LOGITS, BATCH, OTHER = "activations", "logits and loss", "batch", "other"
UNRECORDED = "no stack recorded"
_BY_STAGE: dict[Stage, str] = {
    "loading": WEIGHTS,
    "batch": BATCH,
    "forward": ACTIVATIONS,
    "evaluation": ACTIVATIONS,
    "loss": LOGITS,
    "backward": BACKWARD,
    "recompute": AGAIN,
    "optimizer": OPTIMIZER,
}


def purpose_of(frames: Sequence[Frame], *, recorded: bool = True) -> str:
    """The purpose of a block by its stack, outermost frame first; ``recorded``: its allocation was seen."""
    python = [f for f in frames if path_of(f).endswith((".py", ">"))]
    if not python:
        return BACKWARD if recorded or frames else UNRECORDED
    last = python[-1]
    if last.function in ("unpack_hook", "recompute_fn") or _below_checkpoint(python):
        return AGAIN
    if last.function == "__init__" and "/optim" not in path_of(last):
        return WEIGHTS
    return _BY_STAGE.get(stage_of(python), OTHER)


def _below_checkpoint(frames: Sequence[Frame]) -> bool:
    """Whether autograd's thread called back into Python to run a region again: its stack begins there."""
    return path_of(frames[0]).endswith("/torch/utils/checkpoint.py") and frames[0].function in (
        "unpack_hook",
        "recompute_fn",
        "backward",
        "inner_unpack",
    )
