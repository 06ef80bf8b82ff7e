"""Raise ConflictError for what a plan cannot be carried out on, rather than guess.

That is other activation checkpointing (two owners of one layer), kinds of modules that cannot run again, and code under
which hooks on saved tensors do not work.
"""

from __future__ import annotations

import inspect
from traceback import walk_tb

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autockpt.errors import ConflictError

_GRAPH = torch.autograd.graph
_SWITCH = (inspect.unwrap(_GRAPH.disable_saved_tensors_hooks), _GRAPH.saved_tensors_hooks.__enter__)
# where torch raises the error that hooks on saved tensors are disabled
_SWITCHED_OFF = [function.__code__ for function in _SWITCH]
_FLAGS = ("gradient_checkpointing", "activation_checkpointing", "grad_checkpointing")
_OTHER_ACTIVATION = "Use `save` or `remake` on {unit}, or another activation function."
_ANOTHER_MODULE = "Use `save` or `offload` on {unit}, or the module that it was scripted or traced from."
_REFUSED: dict[type[nn.Module], tuple[str, str]] = {
    # its kernel writes to a tensor after autograd has saved it: hooks on saved tensors see it before, and a copy would
    # hold something else
    nn.RReLU: ("an RReLU, which changes a tensor after it was saved", _OTHER_ACTIVATION),
    # its interpreter can neither be left in the middle of a recomputation nor be looked at, and runs other code in its
    # first calls than in later ones
    torch.jit.ScriptModule: ("a TorchScript module, which cannot run again for backward", _ANOTHER_MODULE),
}
"""Kinds of modules, why a unit with one is refused, and what to do."""


def with_switches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have a switch of their own for activation checkpointing, on or off, with their paths."""
    return [(path, inner) for path, inner in model.named_modules() if any(hasattr(inner, flag) for flag in _FLAGS)]


def refuse_native(module: nn.Module, name: str) -> None:
    """Raise ConflictError where a module's own activation checkpointing is switched on."""
    values = module.__dict__
    for flag in _FLAGS:
        if values.get(flag) is True:
            raise ConflictError(
                f"{name or type(module).__name__} has {flag}=True while an autockpt plan is applied to the model",
                remedy="Switch one off: leave activation_checkpointing (gradient_checkpointing) out of the trainer's "
                "arguments and call model.activation_checkpointing_disable(), or remove the plan.",
            )


_NOT_UNDER_HOOKS = (
    "support saved tensor hooks",
    "NestedTensorImpl doesn't support",
    "convert all Tensors to FakeTensors",
)


def refuse_by_message(error: Exception, unit: str) -> None:
    """Raise ConflictError where ``error`` says that hooks on saved tensors are in the way: that of torch.func, of
    strided nested tensors (which have no shape to know them by), of hooks that are switched off, and of ops such
    as torch.cond and scan, which torch compiles where they stand."""
    switched_off = any(frame.f_code in _SWITCHED_OFF for frame, _ in walk_tb(error.__traceback__))
    compiling = type(error).__module__ == "torch._dynamo.exc"
    if switched_off or compiling or any(part in str(error) for part in _NOT_UNDER_HOOKS):
        raise ConflictError(
            f"{unit} does what PyTorch does not do where saved tensors are dropped or moved (gradients by torch.func, "
            f"torch.cond, strided nested tensors, hooks on saved tensors off): {str(error).splitlines()[0]}",
            remedy=f"Use `save` on {unit}; or torch.autograd.grad in place of torch.func, all tensors that torch.cond "
            "reads as its operands, nested tensors with layout=torch.jagged.",
        ) from error


def refuse_capture(device: torch.device, unit: str) -> None:
    """Raise ConflictError while a graph of the device's work (a CUDA graph) is being captured: its replay would copy to
    and from host memory that has other uses by then."""
    capturing = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise ConflictError(
            f"a CUDA graph is being captured, and {unit} offloads what it saves: replays would copy through host "
            "memory that is handed out again in each step",
            remedy="Use save for units inside of captured graphs.",
        )


def refuse_modules(module: nn.Module, unit: str, *kinds: type[nn.Module]) -> None:
    """Raise ConflictError where a module in a unit is of one of ``_REFUSED``; ``kinds``: of one of these alone."""
    for kind in kinds or _REFUSED:
        for path, inner in module.named_modules():
            if isinstance(inner, kind):
                why, remedy = _REFUSED[kind]
                name = ".".join(filter(None, (unit, path)))
                raise ConflictError(f"{name} is {why}", remedy=remedy.format(unit=unit))


def refuse_lazy(module: nn.Module, unit: str) -> None:
    """Raise ConflictError where a unit has parameters or buffers that its first forward is to give a shape."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConflictError(
                f"{unit}.{path} is not initialised: lazy modules get their shapes in a first forward",
                remedy="Run the model once before the plan is applied, as before an optimizer is made.",
            )


def refuse_wrappers(model: nn.Module) -> None:
    """Raise ConflictError where somebody else recomputes a part of the model, or copies it so that units mix up."""
    for path, module in model.named_modules():
        refuse_native(module, path)
        if type(module).__name__ == "CheckpointWrapper":
            raise ConflictError(
                f"{path} is wrapped for activation checkpointing already (CheckpointWrapper)",
                remedy="Apply the plan to the unwrapped model: leave out apply_activation_checkpointing or "
                "FSDP's activation_checkpointing option.",
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ConflictError(
                "nn.DataParallel copies modules in a way that would run a plan on the first device's weights",
                remedy="Use DistributedDataParallel (torchrun), or a single device.",
            )
