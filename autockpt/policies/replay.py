"""Running a unit's forward a second time, with everything it read as it was the first time."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.policies.arguments import hidden_tensors, put_together, take_apart
from autockpt.policies.attachment import Attachment, call_inner
from autockpt.policies.base import InPlaceError
from autockpt.policies.buffers import BufferWatch, Seen, as_seen

_current = threading.local()


def recomputing() -> str | None:
    """The unit whose forward this thread is running again for backward; None in an ordinary forward.

    For module hooks inside a recomputed unit that must act only once per step.
    """
    return getattr(_current, "unit", None)


class ReplayState(Attachment):
    """A unit's attachment, with what its calls taught about its buffers and its use of NumPy's random state."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self.buffers = BufferWatch()
        self.uses_numpy_random: bool | None = None
        self._cache_parameters: list[tuple[nn.Module, str]] | None = None

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The unit's parameters as they are now: FSDP exchanges them, so the modules are asked each time."""
        if self._cache_parameters is None:
            self._cache_parameters = [(owner, name) for owner in module.modules() for name in owner._parameters]
        found = (owner._parameters.get(name) for owner, name in self._cache_parameters)
        return [p for p in found if p is not None]


class Replay:
    """One call of a unit: first the ordinary forward, and the same again whenever backward asks for it.

    ``tensors`` are all tensors among the arguments, however nested, to be handed in by position at every call: so
    autograd holds them, checks their versions and knows their devices. Everything else stays in a template.
    """

    def __init__(self, module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.state = module, state
        self.tensors: list[torch.Tensor] = []
        objects: list[Any] = []
        self.template = take_apart((args, kwargs), self.tensors, objects)
        self.first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.hidden = _Versions(list(hidden_tensors(objects)) if objects else [])
        self.parameters = _Versions(state.parameters(module))
        self.host_random = _HostRandom(state)
        self.buffers: list[Seen] = state.buffers.before(module)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.first is not None:
            # the caller's own containers: a layer may write into a dict that it was given
            args, kwargs = self.first
            self.first = None
            return call_inner(self.module, self.state, args, kwargs)
        return self._again(tensors)

    def finish(self, versions: list[int]) -> None:
        """The first forward has ended; ``versions`` are those of ``tensors`` from before it.

        Raises ConflictError where it did what cannot be done twice.
        """
        unit = self.state.unit
        inputs = [t for t, version in zip(self.tensors, versions, strict=True) if t._version != version]
        for what, changed in (("inputs", inputs), ("parameters", self.parameters.changed())):
            if changed:
                raise ConflictError(
                    f"{unit} changes one of its {what} (shape {tuple(changed[0].shape)}) in place, "
                    "so its forward cannot be run again",
                    remedy=f"Use `save` or `offload` on {unit}, or switch off inplace=True in its first operation.",
                )
        self.buffers = self.state.buffers.after(self.module, unit, self.buffers)
        self.host_random.finish(self.state)
        self.tensors = []

    def _again(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        unit = self.state.unit
        self.parameters.check(unit, "a parameter")
        self.hidden.check(unit, "a tensor among the arguments")
        args, kwargs = put_together(self.template, iter(tensors))
        with _marked(unit), self.host_random.restored(), as_seen(unit, self.buffers):
            return call_inner(self.module, self.state, args, kwargs)


class _Versions:
    """Tensors that a recompute reads without autograd knowing, with their version counters."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.versions = [t._version for t in tensors]

    def changed(self) -> list[torch.Tensor]:
        """Those that were changed in place since."""
        return [t for t, version in zip(self.tensors, self.versions, strict=True) if t._version != version]

    def check(self, unit: str, what: str) -> None:
        """Raise InPlaceError where one was changed in place since."""
        for tensor in self.changed():
            raise InPlaceError(
                f"{what} of {unit} (shape {tuple(tensor.shape)}) needed for gradient computation has been modified by "
                "an inplace operation between forward and backward",
                remedy="Change it after backward: an optimizer step before the last backward of a graph does this.",
            )


@contextmanager
def _marked(unit: str) -> Iterator[None]:
    before = recomputing()
    _current.unit = unit
    try:
        yield
    finally:
        _current.unit = before


class _HostRandom:
    """Random state of Python and NumPy, which torch does not look after. Kept only where a forward used it.

    NumPy's is costly to read, so after a first call that left it alone it is not looked at again.
    """

    def __init__(self, state: ReplayState) -> None:
        numpy = sys.modules.get("numpy") if state.uses_numpy_random is not False else None
        self.python: Any = random.getstate()
        self.numpy: Any = numpy.random.get_state() if numpy is not None else None

    def finish(self, state: ReplayState) -> None:
        # any draw moves the index behind the 624 words or, at the end of them, replaces them all
        (_, words, gauss), (_, words_now, gauss_now) = self.python, random.getstate()
        if words[-1] == words_now[-1] and words[:4] == words_now[:4] and gauss == gauss_now:
            self.python = None
        if self.numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            used = now[2] != self.numpy[2] or bool((now[1] != self.numpy[1]).any()) or now[3:] != self.numpy[3:]
            state.uses_numpy_random = used or bool(state.uses_numpy_random)
            if not used:
                self.numpy = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        if self.python is None and self.numpy is None:
            yield
            return
        python_now = random.getstate()
        numpy_now = sys.modules["numpy"].random.get_state() if self.numpy is not None else None
        try:
            if self.python is not None:
                random.setstate(self.python)
            if self.numpy is not None:
                sys.modules["numpy"].random.set_state(self.numpy)
            yield
        finally:
            random.setstate(python_now)
            if numpy_now is not None:
                sys.modules["numpy"].random.set_state(numpy_now)
