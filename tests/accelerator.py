"""PyTorch's generic accelerator API answered with numbers and notes, for a kind that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

KIND = "xpu"  # a name that every torch.device takes
GIB = 2**30


@dataclass
class Event:
    """A moment on a stream."""

    stream: Stream


@dataclass
class Stream:
    """Notes what it was given."""

    name: str
    device_index: int = 0
    waited: list[Event] = field(default_factory=list)

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]


class Accelerator:
    """Two devices of 16 GiB, of which 1 GiB is held by others; the allocator reserves 2 GiB and once held 3."""

    def __init__(self) -> None:
        self.opened = False
        self.share = 1.0
        self.calls: list[str] = []
        self.states = [torch.full((8,), index, dtype=torch.uint8) for index in range(2)]
        self.current_index = 0
        self.streams = {0: Stream("compute 0"), 1: Stream("compute 1", 1)}
        self.made: list[Stream] = []
        self.module = SimpleNamespace(
            is_initialized=lambda: self.opened,
            _is_in_bad_fork=lambda: True,  # so torch.manual_seed leaves the states alone
            device_count=lambda: 2,
            get_device_name=lambda device: f"card {device.index}",
            get_rng_state=lambda index: self.states[index].clone(),
            set_rng_state=lambda state, index: self.states.__setitem__(index, state.clone()),
            manual_seed_all=lambda seed: [state.fill_(seed) for state in self.states],
            get_per_process_memory_fraction=lambda device: self.share,
            set_per_process_memory_fraction=lambda share, device: setattr(self, "share", share),
        )

    def stats(self, device: torch.device) -> dict[str, int]:
        assert device.type == KIND  # by number it could be another kind's
        return {"reserved_bytes.all.peak": 3 * GIB, "reserved_bytes.all.current": 2 * GIB, "num_alloc_retries": 4}

    def make_stream(self, device: torch.device) -> Stream:
        self.made.append(Stream(f"copies {len(self.made)}", device.index))
        return self.made[-1]

    def set_stream(self, stream: Stream) -> None:
        self.current_index = stream.device_index
        self.streams[stream.device_index] = stream

    def answers(self) -> dict[str, Any]:
        return {
            "current_accelerator": lambda: torch.device(KIND),
            "device_count": lambda: 2,
            "memory_stats": self.stats,
            "get_memory_info": lambda device: (13 * GIB, 16 * GIB),
            "memory_reserved": lambda device: 2 * GIB,
            "max_memory_reserved": lambda device: self.stats(device)["reserved_bytes.all.peak"],
            "max_memory_allocated": lambda device: GIB,
            "reset_peak_memory_stats": lambda device: self.calls.append("reset peaks"),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "synchronize": lambda device: self.calls.append("wait"),
            "current_device_index": lambda: self.current_index,
            "set_device_index": lambda index: setattr(self, "current_index", index),
            "current_stream": lambda device: self.streams[device.index],
            "set_stream": self.set_stream,
        }


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """In the place of ``torch.accelerator``, ``torch.Stream`` and the kind's own module."""
    import_module("torch._dynamo")  # it asks torch.xpu for more than there is here, once, as it is imported
    made, empty = Accelerator(), torch.empty

    def allocate(*size: int, device: Any = "cpu", pin_memory: bool = False, **how: Any) -> torch.Tensor:
        made.opened = made.opened or torch.device(device).type == KIND
        return empty(*size, **how)

    for name, answer in made.answers().items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    monkeypatch.setattr(torch, KIND, made.module)
    monkeypatch.setattr(torch, "Stream", made.make_stream)
    monkeypatch.setattr(torch, "empty", allocate)
    torch.get_device_module.cache_clear()
    yield made
    torch.get_device_module.cache_clear()
