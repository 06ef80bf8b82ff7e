"""Fingerprints of tensors: 64 bits that depend on every bit of a tensor and on where it is. And pairs of them, compared
on their device and read by the host all at once.

The tensor's bytes are read as 32-bit words; each is multiplied by an odd 64-bit number that belongs to its place, and
the products are summed modulo 2^64 (multiply-add hashing: Carter and Wegman 1979). Words are half as wide as the sums,
so that no bit of a word can fall out at the top: with words of full width two changed signs would cancel. Nothing is
read by the host, nothing draws random numbers, and memory is bounded: one block of products, and one table of the
numbers, per device.

``torch.hash_tensor`` is an exclusive or of all elements, the same for every order of them.

Where kernels do not repeat themselves bit by bit, as on accelerators, a count sketch stands for each tensor (Charikar,
Chen, Farach-Colton 2002): every element gets a random sign and is added to one of a few sums. The sketch of a
difference is the difference of the sketches, and on average its squared length is that of the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

_ON_CPU, _ELSEWHERE = 1 << 14, 1 << 17
"""Numbers in the table of a device, 128 KiB or 1 MiB of them. A table of more would lie where caching allocators keep
activations, and whatever is allocated with it there takes another segment of 20 MiB."""
TABLE_BYTES = 8 * _ELSEWHERE
"""What fingerprints keep on an accelerator from the first one on."""
_TABLES_ON_CPU, _TABLES_ELSEWHERE = 1, 16
"""Tables of words at a time: products that fit a core's cache; or few launches of kernels, as a GPU waits for its host
where a layer's half a gigabyte goes through them one table at a time, for 16 MiB of products that are there for a
moment."""
_WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))

SUMS = 64
"""The length of a difference is known to about 1 / sqrt(2 · SUMS): 9 %."""
_AT_A_TIME = SUMS << 14

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""How far apart, relative to its length, a gradient may be for another order of sums, by the coarsest type in use."""

PLAIN = frozenset((torch.Tensor, nn.Parameter))
"""Types of tensors that are their memory and nothing else."""

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], Any]


@contextmanager
def quietly() -> Iterator[None]:
    """What runs inside is not seen by modes, which would count, tape or keep it."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        yield


def why_not(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no fingerprint; None where it has one. Parameters count as plain tensors."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        odd = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.is_meta
        if not odd and (not tensor.numel() or tensor.untyped_storage().nbytes()):
            return None
    return "a tensor that is no plain one, or has no memory (sharded)"


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint, one int64 on the tensor's device. Strides do not count.

    Equal tensors of equal type have equal fingerprints; others with a chance of about 2^-64, and 2^-32 where only signs
    differ.
    """
    with quietly():
        return _sum_of(tensor.detach())


def _sum_of(memory: torch.Tensor) -> torch.Tensor:
    most = 4 * _words_at_a_time(memory.device) // memory.element_size()
    if memory.numel() <= most:
        return _sum_of_piece(memory)
    inner = memory.numel() // memory.size(0)  # cut by the size alone
    parts = memory.split(most // inner) if inner <= most else memory.unbind(0)
    return _sum_of(torch.stack([*map(_sum_of, parts)]))


def _sum_of_piece(piece: torch.Tensor) -> torch.Tensor:
    flat = piece.reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    width = flat.element_size()
    nbytes = flat.numel() * width
    size, dtype = next((size, dtype) for size, dtype in _WORDS if nbytes % size == 0)
    if width < size and (int(flat.storage_offset()) * width) % size:
        flat = flat.clone()  # the memory begins within a word
    found = [part for words in flat.view(dtype).split(_words_at_a_time(flat.device)) for part in _sums_of(words)]
    return found[0].view(()) if len(found) == 1 and found[0].numel() == 1 else _sum_of(torch.cat(found))


def _sums_of(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """One sum for each table's worth of words, then that of the rest."""
    numbers = _numbers(words.device)
    tables, rest = divmod(words.numel(), len(numbers))
    if tables:
        yield torch.mul(words[: words.numel() - rest].view(tables, -1), numbers).sum(1)
    if rest or not tables:
        yield torch.mul(words[words.numel() - rest :], numbers[:rest]).sum().view(1)


def _table_size(device: torch.device) -> int:
    return _ON_CPU if device.type == "cpu" else _ELSEWHERE


def _words_at_a_time(device: torch.device) -> int:
    return _table_size(device) * (_TABLES_ON_CPU if device.type == "cpu" else _TABLES_ELSEWHERE)


def host_values(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """What stands on devices, one number or truth in each tensor; the host waits once for each device."""
    found: dict[int, Any] = {}
    with quietly(), torch.no_grad():
        for device in {number.device for number in numbers}:
            places = [place for place, number in enumerate(numbers) if number.device == device]
            found.update(zip(places, torch.stack([numbers[place] for place in places]).tolist(), strict=True))
    return [found[place] for place in range(len(numbers))]


def stream_of(device: torch.device) -> Any:
    """The stream that this thread queues on, None where there are none. On another, memory may not be written yet."""
    return None if device.type in ("cpu", "mps", "meta") else torch.accelerator.current_stream(device)


_tables: dict[torch.device, torch.Tensor] = {}


def _numbers(device: torch.device) -> torch.Tensor:
    """The odd numbers of the places 0, 1, …, the same everywhere (the finalizer of splitmix64: Steele et al. 2014)."""
    table = _tables.get(device)
    if table is None:
        table = torch.arange(1, _table_size(device) + 1, device=device).mul_(-7046029254386353131)
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            table.bitwise_xor_(table >> shift).mul_(factor)
        table.bitwise_or_(1)
        if (stream := stream_of(device)) is not None:
            stream.synchronize()  # once: other streams will read it, and wait for nobody
        _tables[device] = table
    return table


class Compared(NamedTuple):
    """Two fingerprints of what should be one and the same; sketches where a device need not repeat itself.

    ``stream``: the one that all of them were queued on.
    """

    what: str
    expected: torch.Tensor
    found: torch.Tensor
    stream: Any
    distance: torch.Tensor | None = None
    tolerance: float | None = None


def read_verdicts(compared: list[Compared]) -> list[tuple[bool, float]]:
    """Whether each pair is equal, and how far its sketches are apart; one read per device, another of sketches."""
    for device, stream in {(pair.found.device, pair.stream) for pair in compared}:
        if (here := stream_of(device)) != stream:  # the end of a backward need not come after these
            here.wait_event(stream.record_event())
    prints = host_values([print for pair in compared for print in (pair.expected, pair.found)])
    apart = iter(host_values([pair.distance for pair in compared if pair.distance is not None]))
    away = [0.0 if pair.distance is None else next(apart) for pair in compared]
    return [(a == b, far) for a, b, far in zip(prints[::2], prints[1::2], away, strict=True)]


def sketch_of(tensor: torch.Tensor) -> torch.Tensor:
    """The count sketch of a tensor, on its device. No mode sees it made: ``remake`` would hold the tensor's elements
    for ops of the unit's own."""
    with quietly():
        flat = tensor.detach().reshape(-1)
        generator = torch.Generator(device=flat.device).manual_seed(20)
        total = torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
        for part in flat.split(_AT_A_TIME):
            signs = torch.empty_like(part, dtype=torch.float64).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
            signed = nn.functional.pad(part.double() * signs, (0, -part.numel() % SUMS))
            total += signed.view(-1, SUMS).sum(0)
        return total


def distance_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How far two sketches are apart, relative to the length of the first. What is in both alike, NaN too, is not."""
    with quietly():
        alike = (first == second) | (first.isnan() & second.isnan())
        apart = torch.where(alike, 0.0, first - second).norm()
        away = torch.where(apart == 0.0, 0.0, apart / first.norm())
        return torch.where(away.isnan(), torch.inf, away)


def repeats(device: torch.device) -> bool:
    """Whether a device's kernels repeat themselves bit by bit: on accelerators only deterministic ones surely do."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest distance of two sketches of this type, relative to their length, that counts as rounding."""
    return TOLERANCE.get(str(dtype).removeprefix("torch."), TOLERANCE["bfloat16"])


def layout_of(tensor: torch.Tensor) -> Layout:
    """All that says how a tensor lies in its memory."""
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def laid_out_on(storage: torch.UntypedStorage, device: torch.device, layout: Layout) -> torch.Tensor:
    """The tensor that lies so in this memory."""
    dtype, size, stride, offset = layout
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """Shares the tensor's version counter and none of its memory."""
    probe = tensor.detach()
    probe.data = _empty(tensor.dtype, tensor.device)
    return probe


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One for the whole process. No dispatch mode sees it made: a recorded step is the same whatever ran before it."""
    with quietly():
        return torch.empty(0, dtype=dtype, device=device)


def left_unwritten(node: Any, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one that this autograd node saves and its kernel need not write, nor backward read.

    Batch norm in training saves running statistics, and writes to them afterwards without a new version; those of
    ``InstanceNorm`` are a copy of its own. They look like the two vectors of the batch's, which follow from its input.
    ``rrelu`` outside of training makes room for its slopes; cuDNN's and MIOpen's reserved space has gaps, and so has
    oneDNN's workspace. Fused attention saves the state of its generator, one or two 64-bit integers, which without
    dropout are empty memory (PyTorch's ``transformers/cuda/attention.cu``, ``flash_attn/flash_api.cpp``); a third that
    flash attention saves, of no dimension and type uint64, always is. Other integers there, lengths of sequences, are
    32 bits wide. CTC loss (``LossCTC.cpp``) writes its table, of each row by time and place in the target, as far as
    that row goes; so does memory-efficient attention to packed sequences with its sums for each head and place.
    """
    name = node.name()
    if name.startswith("CtcLoss"):  # log-probabilities have the row second
        rows = node._input_metadata[0].shape[0]
        return tensor.dim() == 3 and tensor.size(0) == rows and tensor.size(2) % 2 == 1
    if name.startswith("EfficientAttention") and tensor.dim() == 3:  # what it attends to and with has four
        return True
    if name.startswith("RreluWithNoise"):
        return not node._saved_training
    if "Attention" in name and tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= 2:
        never = tensor.dtype is torch.uint64 and tensor.dim() == 0
        return never or not getattr(node, "_saved_dropout_p", 0.0)
    if "BatchNorm" in name and tensor.dim() == 1 and not isinstance(tensor, nn.Parameter):
        return getattr(node, "_saved_training", False)
    return name.startswith(("Cudnn", "Miopen", "MkldnnRnn")) and tensor.dtype is torch.uint8


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor."""
    return getattr(tensor, "_local_tensor", tensor) if type(tensor) is not torch.Tensor else tensor
