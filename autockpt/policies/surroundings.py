"""What a forward reads that is neither argument, parameter nor buffer, and that torch's recompute does not look after:
the random states of Python, NumPy and generators among the arguments, and which attention kernels are allowed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_KERNELS = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


class NumpyUse:
    """Whether a unit draws from NumPy's random state. Reading that is costly, so a first call decides."""

    known: bool | None = None


class Surroundings:
    """Taken before a forward; ``finish`` after it drops what the forward did not use."""

    def __init__(self, generators: Sequence[torch.Generator], numpy_use: NumpyUse) -> None:
        numpy = sys.modules.get("numpy") if numpy_use.known is not False else None
        self._python: Any = random.getstate()
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None
        self._numpy_use = numpy_use
        self._generators = [(g, g.get_state()) for g in generators]
        self._kernels = _allowed_kernels()

    def finish(self) -> None:
        """The forward has ended."""
        # any draw moves the index behind the 624 words or, at the end of them, replaces them all
        (_, words, gauss), (_, words_now, gauss_now) = self._python, random.getstate()
        if words[-1] == words_now[-1] and words[:4] == words_now[:4] and gauss == gauss_now:
            self._python = None
        if self._numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            used = now[2] != self._numpy[2] or bool((now[1] != self._numpy[1]).any()) or now[3:] != self._numpy[3:]
            self._numpy_use.known = used or bool(self._numpy_use.known)
            if not used:
                self._numpy = None

    def differ(self) -> bool:
        """Whether running again as things are now could give something else."""
        return bool(
            self._python is not None
            or self._numpy is not None
            or self._generators
            or self._kernels != _allowed_kernels()
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As before the forward, and afterwards as now."""
        python, kernels = random.getstate(), _allowed_kernels()
        numpy = sys.modules["numpy"].random if self._numpy is not None else None
        numpy_state = numpy.get_state() if numpy is not None else None
        generators = [g.get_state() for g, _ in self._generators]
        try:
            if self._python is not None:
                random.setstate(self._python)
            if numpy is not None:
                numpy.set_state(self._numpy)
            for generator, state in self._generators:
                generator.set_state(state)
            _allow_kernels(self._kernels)
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(numpy_state)
            for (generator, _), state in zip(self._generators, generators, strict=True):
                generator.set_state(state)
            _allow_kernels(kernels)


def _allowed_kernels() -> list[bool]:
    return [enabled() for enabled, _ in _KERNELS]


def _allow_kernels(wanted: list[bool]) -> None:
    for (_, enable), value in zip(_KERNELS, wanted, strict=True):
        enable(value)
