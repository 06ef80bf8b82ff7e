"""What a stack tells: which stage of training it belongs to, and which of its frames say most.

Frames come outermost first. All of this is by file and function names, so it is a reading, not a proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autockpt.schema.diagnosis import Frame, Place, Stage

_CALL = re.compile(r"(?<![\w.])(?:self\.)?([A-Za-z_][\w.]*(?:\[[\w\"']+\])*)\(")
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")
_TRAINERS = ("/transformers/trainer", "/trl/trainer/", "/pytorch_lightning/", "/lightning/", "/unsloth/", "unsloth_")
# packages that run models and are none: PyTorch, trainers and wrappers, which say little of what was computed
_MACHINERY = ("/torch/", "/accelerate/", "/contextlib.py", "/peft/", "/trl/", "/deepspeed/", *_TRAINERS, "<frozen")
_LOADING = {
    "from_pretrained",
    "_load_pretrained_model",
    "load_state_dict",
    "_load_state_dict_into_model",
    "_load_state_dict_into_meta_model",
    "set_module_tensor_to_device",
    "from_config",
    "_move_model_to_device",
}
_BATCH = {"_prepare_inputs", "_prepare_input", "send_to_device", "pin_memory", "_pin_memory_loop", "to_device"}
_EVALUATION = {"evaluate", "evaluation_loop", "prediction_step", "prediction_loop", "generate", "validation_step"}
_LOSS_FILES = ("/loss/loss_utils.py", "/loss.py", "/torch/nn/modules/loss.py", "/fused_linear_cross_entropy.py")
_LOSS_FUNCTIONS = {"cross_entropy", "nll_loss", "ForCausalLMLoss", "fixed_cross_entropy", "loss_function"}
_LOSS_CODE = re.compile(
    r"lm_head\(|cross_entropy\(|loss_function\(|loss_fct\(|logits(?:\.float\(\)|\.to\()|criterion\("
)
_RERUNS = ("unpack_hook", "recompute_fn", "backward")
_STEP_CODE = re.compile(r"\boptim\w*\.step\(|\bopt\.step\(")


def path_of(frame: Frame) -> str:
    """The frame's file with forward slashes."""
    return frame.file.replace("\\", "/")


def stage_of(frames: Sequence[Frame]) -> Stage:
    """The stage of training that a stack belongs to."""
    functions = {_function(f) for f in frames}
    if functions & _EVALUATION:
        return "evaluation"
    if any(_in_optimizer(f) for f in frames):
        return "optimizer"
    if any(_in_backward(f) for f in frames):
        checkpointed = [f for f in frames if path_of(f).endswith("/torch/utils/checkpoint.py")]
        return "recompute" if any(_function(f) in _RERUNS for f in checkpointed) else "backward"
    inner = _inside_trainer(frames)
    if any(_in_loss(f) for f in inner):
        return "loss"
    of_modules = {_function(f) for f in frames if path_of(f).endswith("/torch/nn/modules/module.py")}
    if functions & _LOADING or of_modules & {"_apply", "cuda", "to", "convert"}:  # module.to(device), module.cuda()
        return "loading"
    if any(_function(f) in ("forward", "_call_impl", "_wrapped_call_impl") for f in inner):
        return "forward"
    return "batch" if functions & _BATCH else "unknown"


def _function(frame: Frame) -> str:
    """Its bare name: IPython qualifies functions with their class."""
    return frame.function.rsplit(".", 1)[-1]


def _in_optimizer(frame: Frame) -> bool:
    path = path_of(frame)
    library = "/torch/optim/" in path or "/bitsandbytes/optim/" in path or "/apex/optimizers/" in path
    # accelerate and learning rate schedulers wrap step() without doing its work
    return (library and not path.endswith("/lr_scheduler.py")) or bool(_STEP_CODE.search(frame.code))


def _in_backward(frame: Frame) -> bool:
    path, function = path_of(frame), _function(frame)
    engine = "/torch/autograd/" in path and function in ("backward", "_engine_run_backward", "grad")
    return engine or (path.endswith("/torch/_tensor.py") and function == "backward") or ".backward(" in frame.code


def _in_loss(frame: Frame) -> bool:
    path = path_of(frame)
    if path.endswith(_LOSS_FILES) or _function(frame) in _LOSS_FUNCTIONS:
        return True
    return _function(frame) == "forward" and bool(_LOSS_CODE.search(frame.code))


def _inside_trainer(frames: Sequence[Frame]) -> Sequence[Frame]:
    """What lies within the innermost frame of a trainer: its compute_loss wraps the whole forward pass."""
    last = max((i for i, f in enumerate(frames) if any(t in path_of(f) for t in _TRAINERS)), default=-1)
    return frames[last + 1 :] or frames


def _lies_in(frame: Frame, packages: Iterable[str]) -> bool:
    """Whether a frame is of these packages, or of no file."""
    path = path_of(frame)
    return path.startswith("<") or any(part in path for part in packages)


def place_of(frames: Sequence[Frame]) -> Place:
    """Where a stack was: its stage, what the model called, and the frames that say most."""
    if not frames:
        return Place()
    calls = [f for f in _inside_trainer(frames) if _function(f) in ("forward", "__call__")]
    model = [f for f in calls if not _lies_in(f, _MACHINERY)]
    user = [f for f in frames if path_of(f).endswith(".py") and not _lies_in(f, _INSTALLED)]
    return Place(
        stage=stage_of(frames),
        calls=tuple(_called(model)),
        model=model[-1] if model else None,
        user=user[-1] if user else None,
    )


def _called(frames: Iterable[Frame]) -> Iterable[str]:
    """Names that the model's frames call, as far as the log has their source line."""
    for frame in frames:
        # of several calls on a line the outermost is written first
        if (match := _CALL.search(frame.code.split("=", 1)[-1])) is not None:
            yield match[1].removeprefix("self.")


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
