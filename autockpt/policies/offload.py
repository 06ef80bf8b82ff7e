"""offload: what a unit saves is copied off the device after its forward and fetched before its backward.
recompute_offload: the unit is recomputed in backward, and its input is off the device until then."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.arguments import tensors_of, unpack
from autockpt.checkpointing.divergence import CheckedCall
from autockpt.checkpointing.offloaded import OffloadedCall, OffloadHooks
from autockpt.devices.base import Transport
from autockpt.devices.transport import OffloadTransports, Transports
from autockpt.policies.base import Attachment, PlannedUnit, Session, call_inner, device_of, is_enabled
from autockpt.policies.compiling import compiled_by, eagerly, outside_graphs, skip_frames
from autockpt.policies.conflicts import refuse_by_message, refuse_capture, refuse_modules
from autockpt.policies.recompute import attach_recompute
from autockpt.policies.saved_weights import keep_identity
from autockpt.schema.choices import Offload, RecomputeOffload
from autockpt.schema.graph import Tier

_forward_ended = eagerly(CheckedCall.forward_ended)
MOVING = ("offload", "recompute_offload")
_WHY = "moves what autograd saves by way of hooks"


class OffloadSchedule:
    """When the device memory of offloaded calls is given up, and the transports that all calls in one model share.

    A call is settled when its forward has ended. Where copies run alongside compute that waits until the forward of the
    unit ``window`` places later has ended, so that its copies have had that long. In backward each call fetches the one
    before it.
    """

    def __init__(self, transports: Transports) -> None:
        self._make = transports
        # the transport of a device; raises MeasurementError for kinds of device that have none
        self.transport: Callable[[torch.device, Tier], Transport] = functools.cache(transports)
        self.ends: set[int] = set()  # places of units of other choices after whose forward some are settled
        self.begin()

    def __reduce__(self) -> tuple[type[OffloadSchedule], tuple[OffloadTransports]]:
        # streams and mapped files are not copied; copies and loaded pickles use the usual transports
        return OffloadSchedule, (self._make if isinstance(self._make, OffloadTransports) else OffloadTransports(),)

    def begin(self) -> None:
        """A forward of the whole model begins: its units are not neighbours of an earlier forward's."""
        self.last: OffloadedCall | None = None
        self._unsettled: list[tuple[OffloadState, OffloadedCall]] = []  # whose forwards have ended

    def close(self, state: OffloadState, call: OffloadedCall) -> None:
        """A unit's forward has ended."""
        self.settle_due(state.place)
        self.last = call
        if call.transport.copy_queues:
            self._unsettled.append((state, call))
        else:
            call.settle()

    def settle_due(self, place: int) -> list[OffloadedCall]:
        """The forward of the unit at ``place`` has ended: settle the calls that are due. Calls of units that are not
        before it ran in an earlier round through the same units."""
        done = [call for state, call in self._unsettled if state.due <= place or state.place >= place]
        self._unsettled = [(state, call) for state, call in self._unsettled if call not in done]
        for call in done:
            call.settle()
        return done

    def end(self) -> None:
        """The model's forward has ended."""
        self.settle_due(sys.maxsize)


class SettlingState(Attachment):
    """The attachment of a unit after whose forward others are settled; ``place`` is its own among all units."""

    def __init__(self, unit: str, schedule: OffloadSchedule, place: int) -> None:
        super().__init__(unit)
        self.schedule, self.place = schedule, place


class OffloadState(SettlingState):
    """An offloaded unit's attachment. ``due`` is the place of the unit after whose forward its calls are settled."""

    has_check: ClassVar[bool] = True

    def __init__(self, unit: str, schedule: OffloadSchedule, place: int, due: int, tier: Tier) -> None:
        super().__init__(unit, schedule, place)
        self.due = due
        self.tier: Tier = tier
        self._cache_buffers: list[dict[str, torch.Tensor | None]] | None = None

    def buffers(self, module: nn.Module) -> list[torch.Tensor]:
        if self._cache_buffers is None:  # TorchScript has no dictionaries
            self._cache_buffers = [inner._buffers for inner in module.modules() if isinstance(inner._buffers, dict)]
        return [b for home in self._cache_buffers for b in home.values() if b is not None]


@outside_graphs("offload` or `recompute_offload", _WHY)
def run_offloaded(module: nn.Module, state: OffloadState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves leaves the device.

    Around a recompute that is its inputs. Parameters, buffers, small tensors and tensors from outside stay, the first
    floating-point argument (the hidden state) does not. Tensors of subclasses (DTensor, FP8 of torchao or Transformer
    Engine) stay, too, with a warning: what they hold besides one storage is not known. Raises ConflictError while a
    CUDA graph is captured, MeasurementError where the other side is full, and in backward InPlaceError where a saved
    tensor was changed in place.
    """
    with compiled_by(None) as compiler:  # at work in the unit's own forward, and not here
        if not is_enabled(state):
            with compiled_by(compiler):
                return call_inner(module, state, args, kwargs)
        tensors = tensors_of((args, kwargs))
        hidden = next((t for t in tensors if t.is_floating_point()), None)
        device = device_of(module) if hidden is None else hidden.device
        refuse_capture(device, state.unit)
        schedule = state.schedule
        call = OffloadedCall(state.unit, device, schedule.last, schedule.transport(device, state.tier))
        observer = state.check.observer()
        outside = [t for t in tensors if t is not hidden] + state.buffers(module)
        offloading = OffloadHooks(call, outside, observer, hidden)
        keep_identity()
        back = functools.partial(unpack, unit=state.unit)
        try:
            with saved_tensors_hooks(offloading.pack, back), compiled_by(compiler):
                output = call_inner(module, state, args, kwargs)
        except (RuntimeError, AssertionError) as error:
            refuse_by_message(error, state.unit)
            raise
        if observer is not None:
            _forward_ended(observer)
        schedule.close(state, call)
        return output


def attach_offload(unit: PlannedUnit, session: Session) -> None:
    choice, order = unit.choice, session.order
    assert isinstance(choice, Offload | RecomputeOffload)
    refuse_modules(unit.module, unit.name, nn.RReLU)
    schedule = next((known for known in session.listeners if isinstance(known, OffloadSchedule)), None)
    if schedule is None:
        schedule = OffloadSchedule(session.transports)
        session.listeners.append(schedule)
    place = order.index(unit)
    due = min(place + choice.window, len(order) - 1)
    session.place(unit.module, run_offloaded, OffloadState(unit.name, schedule, place, due, choice.tier))
    device = device_of(unit.module)
    # a device that nothing can be moved off is refused now, not in the middle of training
    transport = schedule.transport(torch.device("cpu") if device.type == "meta" else device, choice.tier)
    if transport.copy_queues and due not in schedule.ends and order[due].choice.kind not in MOVING:
        schedule.ends.add(due)
        session.place(order[due].module, run_then_settle, SettlingState(order[due].name, schedule, due))


def attach_recompute_offload(unit: PlannedUnit, session: Session) -> None:
    """Offload around a recompute: its input is what leaves the device."""
    attach_recompute(unit, session)
    attach_offload(unit, session)


@outside_graphs("offload", _WHY)
def run_then_settle(module: nn.Module, state: SettlingState, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a unit ``window`` places after an offloaded one: when it has ended, that one's copies must be
    done. When its backward begins, they start to come back."""
    output = call_inner(module, state, args, kwargs)
    if state.active and (calls := state.schedule.settle_due(state.place)):
        node = next((t.grad_fn for t in tensors_of(output) if t.grad_fn is not None), None)
        if node is not None:
            for call in calls:
                node.register_prehook(functools.partial(_fetch, weakref.ref(call)))
    return output


def _fetch(call: weakref.ref[OffloadedCall], gradients: Any) -> None:
    if (alive := call()) is not None:
        alive.fetch()


skip_frames(OffloadHooks.pack, unpack)
