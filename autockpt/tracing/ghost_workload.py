"""Turn a workload's tensors into ghosts: in place in a process that has no other use for it, else on a copy."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autockpt.errors import GhostError
from autockpt.interpreter import patched
from autockpt.tracing.ghost import GhostMode
from autockpt.workload import Step
from autockpt.workload.storages import nested_tensors

_WITHOUT_FOREACH = ("cpu", "mps")


def ghost_in_place(workload: Step, mode: GhostMode) -> None:
    """Give every parameter and every large tensor of a workload a storage in ghost memory; views stay views.

    Small tensors keep their values. For a process of one's own: the workload's data is lost there.
    """
    _use_ghosts_in_scaler(workload)
    for parameter in workload.model.parameters():
        parameter.grad = None
    twins = _Twins(mode)
    for tensor in list(_tensors(workload)):
        if isinstance(tensor, nn.Parameter) or not mode.stays_real(tensor):
            tensor.data = twins.ghost(tensor)
        elif tensor.device.type != "cpu":
            tensor.data = tensor.detach().cpu()
    mode.log.adopt(_tensors(workload))


def ghost_copy(workload: Step, mode: GhostMode) -> Step:
    """A copy of a workload whose large tensors are ghosts; the original is not touched. For live models.

    Raises GhostError for a workload with a step of its own (``full_step``), which can only run on the original.
    """
    if workload.full_step is not None:
        raise GhostError(
            "full_step runs on the model itself, so a copy of the workload cannot be ghost-run in this process"
        )
    twins = _Twins(mode)
    memo: dict[int, Any] = {}
    wrapped = {
        id(t) for p in workload.model.parameters() if is_traceable_wrapper_subclass(p) for t in nested_tensors(p)
    }
    for tensor in _tensors(workload):
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = _parameter(tensor, twins.ghost(tensor))
        elif id(tensor) in wrapped:  # weights, though they are integers
            memo[id(tensor)] = twins.ghost(tensor)
        else:
            memo[id(tensor)] = twins.twin(tensor)
    parts = workload.model, workload.optimizer, workload.scaler, workload.batch, workload.snapshot
    try:
        with _CopyAsGhosts(twins):
            model, optimizer, scaler, batch, snapshot = copy.deepcopy(parts, memo)
    except GhostError:
        raise
    except Exception as error:
        raise GhostError(f"the model or its optimizer cannot be copied: {type(error).__name__}: {error}") from None
    twin = dataclasses.replace(
        workload, model=model, optimizer=optimizer, scaler=scaler, batch=batch, snapshot=snapshot
    )
    _use_ghosts_in_scaler(twin)
    mode.log.adopt(_tensors(twin))
    return twin


@contextmanager
def untouched(workload: Step) -> Iterator[None]:
    """Keep the user's gradients and random state as they were, whatever a step in this process does.

    Raises GhostError where the step ran on the original model instead of the one it was given.
    """
    before = [(p, p.grad) for p in workload.model.parameters()]
    strayed = False
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for parameter, gradient in before:
                if parameter.grad is not gradient:
                    parameter.grad, strayed = gradient, True
    if strayed:
        raise GhostError(
            "the step uses a model from its surroundings instead of the one it is given",
            remedy="Use the first argument of loss(model, batch).",
        )


def _use_ghosts_in_scaler(workload: Step) -> None:
    """Let the gradient scaler of a workload of ghosts take them for tensors on its own device."""
    if workload.scaler is not None and hasattr(workload.scaler, "_device"):
        workload.scaler._device = "cpu"


@contextmanager
def optimizers_on(device: torch.device) -> Iterator[None]:
    """Let torch's optimizers choose on ghosts what they choose on ``device``.

    Where neither ``foreach`` nor ``fused`` is set, an optimizer's own rule decides by the type of device. Most take
    ``foreach`` on accelerators, which holds temporaries as large as all trained weights; Adafactor does not.
    ``capturable`` is refused on the CPU, where ghosts are.
    """
    if device.type in _WITHOUT_FOREACH:
        yield
        return
    devices = [*_get_foreach_kernels_supported_devices(), "cpu"]
    with ExitStack() as stack:
        stack.enter_context(patched(optimizers, "_get_foreach_kernels_supported_devices", lambda: devices))
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
                stack.enter_context(patched(module, "_get_capturable_supported_devices", lambda **_: devices))
        yield


class _Twins:
    """Ghosts of tensors; tensors that share a storage share their ghosts' storage."""

    def __init__(self, mode: GhostMode) -> None:
        self._mode = mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def ghost(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise GhostError(f"tensors of layout {tensor.layout} have no ghosts")
        source = tensor.untyped_storage()
        twin = self._storages.get(source._cdata)
        if twin is None:
            twin, _ = self._mode.log.ghost(source.nbytes(), -1)
            self._storages[source._cdata] = twin
        return self._mode.over(twin, tensor)

    def twin(self, tensor: Tensor) -> Tensor:
        """A ghost of a large tensor, a real copy on the CPU of a small one."""
        if not self._mode.stays_real(tensor):
            return self.ghost(tensor).requires_grad_(tensor.requires_grad)
        source = tensor.untyped_storage()
        copied = self._storages.get(source._cdata)
        if copied is None:
            copied = self._storages[source._cdata] = source.cpu().clone()
        twin = self._mode.over(copied, tensor.detach())
        return twin.requires_grad_(tensor.requires_grad)


class _CopyAsGhosts(TorchFunctionMode):
    """Tensors that `deepcopy` finds in any other place become twins, too."""

    def __init__(self, twins: _Twins) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            twin = memo[id(tensor)] = self._twins.twin(tensor)
            return twin
        return func(*args, **(kwargs or {}))


def _parameter(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    twin = nn.Parameter(data, parameter.requires_grad)
    twin.__class__ = type(parameter)
    twin.__dict__ |= vars(parameter)  # type: ignore[operator]
    return twin


def _tensors(workload: Step) -> Iterator[Tensor]:
    return nested_tensors(workload.model, workload.optimizer, workload.scaler, workload.batch, *workload.snapshot)
