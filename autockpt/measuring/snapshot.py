"""Save the state of a live step on the host and restore it, bit-equal and into the same objects."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.devices.random_states import RandomStates
from autockpt.errors import MeasurementError, UsageError
from autockpt.schema.sizes import format_bytes
from autockpt.workload import Step, nested_tensors

Undo = Callable[[], None]


class Snapshot:
    """What a workload's steps can change: weights, buffers, optimizer, scaler, batch, gradients, modes, random states.

    Making it copies every storage to the host and parks gradients there: their tensor objects stay, their memory on the
    device is free until ``restore``. Raises MeasurementError where the host has no room for the copy, with nothing
    changed, and UsageError where a ``snapshot`` object has no state that can be read and restored.
    """

    def __init__(self, workload: Step) -> None:
        self._workload = workload
        self._undo: list[Undo] = []
        roots = (workload.model, workload.optimizer, workload.scaler, workload.batch, *workload.snapshot)
        try:
            self._undo.append(RandomStates().restore)
            self._undo.append(_storages(nested_tensors(*roots)))
            # one by one: if one fails, those that were parked before must be restored
            for undo in _parked_gradients(workload):
                self._undo.append(undo)
            for root in roots:
                self._undo.extend(structure_of(root))
            for item in workload.snapshot:
                self._undo.extend(_own_state(item))
        except (MemoryError, RuntimeError) as error:
            self.restore()
            size = format_bytes(workload.resident_bytes())
            raise MeasurementError(
                f"the state of the model and optimizer ({size}) could not be copied to the host: {error}",
                remedy="Free host memory, or search from the command line (autockpt search), which needs no copy.",
            ) from None
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Put everything back; gradients made since are dropped. The second call does nothing."""
        while self._undo:
            # in reverse order: containers, gradients (into the memory that this frees), then bytes
            self._undo.pop()()


def _storages(tensors: Iterable[Tensor]) -> Undo:
    """Host copies of every storage behind the tensors, once each, restored byte by byte."""
    kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    others: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            others.append((tensor, tensor.detach().clone()))
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in kept and storage.nbytes():
            kept[storage._cdata] = (storage, _host_copy(storage))

    def undo() -> None:
        for storage, saved in kept.values():
            storage.copy_(saved)
        for tensor, saved in others:
            tensor.detach().copy_(saved)

    return undo


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()


def structure_of(root: Any) -> Iterator[Undo]:
    """Restores the contents of containers: states made during steps go, tensors replaced during steps come back."""
    seen, homes = set[int](), [root]
    if isinstance(root, nn.Module):  # memory banks, counts and metrics are in containers among their attributes
        homes = [vars(module) for module in root.modules()]
    elif isinstance(root, (torch.optim.Optimizer, torch.amp.GradScaler)):
        homes = [vars(root)]
    for home in homes:
        yield from _containers(home, seen)


def _own_state(item: Any) -> Iterator[Undo]:
    """The state of an object that knows how to give and take it, where ``structure_of`` does not know its inside."""
    if isinstance(item, (Tensor, nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, dict, list)):
        return
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        saved = _frozen(item.state_dict())
        yield lambda: item.load_state_dict(saved)
    elif not any(True for _ in nested_tensors(item)):
        raise UsageError(
            f"the snapshot object of type {type(item).__name__} has no state that can be restored",
            remedy="Name tensors, modules, optimizers, or objects with state_dict() and load_state_dict().",
        )


def _frozen(value: Any) -> Any:
    """A state dict as it is now. Tensors are not copied: their bytes are restored with all others."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        frozen = copy.copy(value)
        frozen.update((key, _frozen(item)) for key, item in value.items())
        return frozen
    if type(value) in (list, tuple):
        return type(value)(_frozen(item) for item in value)
    return copy.deepcopy(value)


def _containers(root: Any, seen: set[int]) -> Iterator[Undo]:
    """The contents of dicts, lists, sets and deques, at any depth."""
    if not isinstance(root, (dict, list, set, deque)) or id(root) in seen:
        return
    seen.add(id(root))
    yield putting_back(root)
    for value in list(root.values() if isinstance(root, dict) else root):
        yield from _containers(value, seen)


def putting_back(thing: Any) -> Undo:
    """Restores the present contents of a container, or state of a random generator, into the same object."""
    if isinstance(thing, dict):
        return partial(_refilled, thing, dict(thing), thing.update)
    if isinstance(thing, set):
        return partial(_refilled, thing, set(thing), thing.update)
    if isinstance(thing, (list, deque)):
        return partial(_refilled, thing, list(thing), thing.extend)
    if isinstance(thing, random.SystemRandom):
        return lambda: None
    if isinstance(thing, random.Random):
        return partial(thing.setstate, thing.getstate())
    if hasattr(thing, "get_state"):  # torch.Generator, NumPy's RandomState
        return partial(thing.set_state, thing.get_state())
    return partial(setattr, thing.bit_generator, "state", thing.bit_generator.state)  # NumPy's Generator


def _refilled(container: Any, held: Any, refill: Callable[[Any], None]) -> None:
    container.clear()
    refill(held)


def _parked_gradients(workload: Step) -> Iterator[Undo]:
    """Take every gradient off its parameter and its bytes off the device; the tensor objects wait, empty.

    What undoes a change comes before it is made. Undone, the new gradient goes before the old one is refilled.
    """
    parameters: dict[int, nn.Parameter] = {id(p): p for p in workload.model.parameters()}
    for group in workload.optimizer.param_groups if workload.optimizer is not None else ():
        parameters.update({id(p): p for p in group["params"]})
    parked: set[int] = set()
    for parameter in parameters.values():
        gradient = parameter.grad
        storage = gradient.untyped_storage() if gradient is not None and gradient.layout is torch.strided else None
        if storage is not None and storage._cdata not in parked and storage.nbytes() and storage.resizable():
            parked.add(storage._cdata)
            yield partial(_refill, storage, _host_copy(storage))
            storage.resize_(0)
        yield partial(setattr, parameter, "grad", gradient)
        parameter.grad = None


def _refill(storage: torch.UntypedStorage, saved: torch.UntypedStorage) -> None:
    if storage.nbytes() != saved.nbytes():
        storage.resize_(saved.nbytes())
    storage.copy_(saved)
