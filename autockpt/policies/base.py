"""What a policy is: it carries out one kind of choice on live modules. The table of policies is in ``__init__``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from autockpt.devices.transport import Transports
from autockpt.errors import PlanError
from autockpt.policies.attachment import Attachment
from autockpt.schema.choices import ATTENTION, Choice
from autockpt.schema.names import strip_prefixes

_NAMES = """
    torch torchvision torchaudio transformers peft accelerate diffusers timm deepspeed sentence_transformers
    bitsandbytes liger_kernel lightning pytorch_lightning autockpt
"""
_LIBRARIES = frozenset(_NAMES.split())


class PlannedUnit(NamedTuple):
    """One unit of a plan on a live model."""

    name: str
    module: nn.Module
    choice: Choice


class ForwardListener(Protocol):
    """Told by the session when a forward pass of the whole model begins and ends. Copied with the model."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class PolicySession(Protocol):
    """What a policy may ask of the session that attaches it.

    ``order`` holds every unit of the plan, whatever its choice, in the order in which the model calls them.
    ``transports`` gives the way off a device into a tier. ``attached`` says of every unit in words what was really
    attached, ``listeners`` are told about forward passes of the whole model.
    """

    order: Sequence[PlannedUnit]
    transports: Transports
    attached: dict[str, str]
    listeners: list[ForwardListener]

    def place(self, name: str, module: nn.Module, run: Callable[..., Any], state: Attachment) -> None:
        """Make ``run(module, state, *args, **kwargs)`` the module's forward until the session is removed."""


class Policy:
    """Carries out one kind of choice."""

    kind: ClassVar[str]

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        """Attach the choice to ``units``, which stand in order of execution: by itself to each of them, or together.

        Raises ConflictError where that cannot be made safe.
        """
        for unit in units:
            session.attached[unit.name] = self.attach_to(unit, session)

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        """The same to one unit, and in words what was attached. For choices that go unit by unit."""
        raise NotImplementedError

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        """Least and most matrix products, attentions and convolutions that backward must execute again, of ``forward``.

        Held against real steps by ``verify``, so that a choice that silently does nothing is found out. None where the
        choice does not say otherwise.
        """
        return 0, 0


def modules_named(unit: PlannedUnit, names: Sequence[str], what: str, *, called: bool = True) -> dict[str, nn.Module]:
    """Modules by their names inside of a unit.

    Raises PlanError, which says for ``what``, where there is none of that name, or none with a forward where it must be
    ``called``.
    """
    inside = {strip_prefixes(path): module for path, module in unit.module.named_modules() if path}
    for name in names:
        if name not in inside or (called and isinstance(inside[name], nn.ModuleList | nn.ModuleDict)):
            leaves = [path for path, module in inside.items() if not any(True for _ in module.children())]
            forward = "with a forward " if name in inside else ""
            raise PlanError(
                f"{unit.name} has no module named {name!r} {forward}{what}",
                remedy=f"Name modules as seen from the unit, or {ATTENTION!r}; it has: {', '.join(leaves)}.",
            )
    return {name: inside[name] for name in names}


@contextmanager
def setting(place: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of ``place``, None where it is not there, has this value inside, and afterwards the one before."""
    outer = getattr(place, name, None)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, outer)


def is_library(cls: type) -> bool:
    """Whether a class is PyTorch's or that of a library around it, and not the user's own."""
    return cls.__module__.partition(".")[0] in _LIBRARIES


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter or buffer; the CPU for a module without either."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
