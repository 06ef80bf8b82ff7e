"""Pairs of fingerprints and of sketches, compared on their device and read by the host all at once; of what they can be
taken; and digests, which processes can compare.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch

from autockpt.policies.fingerprints import Form, host_values, quietly, stream_of

Place = tuple[Any, ...]
Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], Any]


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


def read(compared: list[Compared]) -> list[tuple[bool, float]]:
    """Whether each pair is equal, and how far its sketches are apart; one read per device, another of sketches."""
    for device, stream in {(pair.found.device, pair.stream) for pair in compared}:
        if (here := stream_of(device)) != stream:  # the end of a backward need not come after these
            here.wait_event(stream.record_event())
    prints = host_values([print for pair in compared for print in (pair.expected, pair.found)])
    apart = iter(host_values([pair.distance for pair in compared if pair.distance is not None]))
    away = [0.0 if pair.distance is None else next(apart) for pair in compared]
    return [(a == b, far) for a, b, far in zip(prints[::2], prints[1::2], away, strict=True)]


def distance_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How far two sketches are apart, relative to the length of the first. What is in both alike, NaN too, is not."""
    with quietly(), torch._C.DisableTorchFunction():
        alike = (first == second) | (first.isnan() & second.isnan())
        away = torch.where(alike, 0.0, first - second).norm() / first.norm()
        return torch.where(away.isnan(), torch.inf, away)


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's type, shape and bytes, the same in every process; one host copy of it is made."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.blake2b(header + flat.numpy().tobytes(), digest_size=12).hexdigest()


def memory_of(tensor: torch.Tensor, form: Form) -> Place:
    """What tells one piece of memory from another while it lives, whichever way round its dimensions are."""
    size = form.size if form.order is None else tuple(form.size[d] for d in form.order)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(size), tensor.dtype, form.flipped, form.repeated


def layout_of(tensor: torch.Tensor) -> Layout:
    """All that says how a tensor lies in its memory."""
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def laid_out_on(storage: torch.UntypedStorage, device: torch.device, layout: Layout) -> torch.Tensor:
    """The tensor that lies so in this memory."""
    dtype, size, stride, offset = layout
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)


def left_unwritten(node: Any, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one that this autograd node saves and its kernel need not write, nor backward read.

    ``rrelu`` outside of training makes room for its slopes; cuDNN's and MIOpen's reserved space has gaps, and so has
    oneDNN's workspace. Fused attention saves the state of its generator, one or two 64-bit integers, which without
    dropout are empty memory (PyTorch's ``transformers/cuda/attention.cu``, ``flash_attn/flash_api.cpp``); a third that
    flash attention saves, of no dimension and type uint64, always is. Other integers there, lengths of sequences, are
    32 bits wide.
    """
    name = node.name()
    if name.startswith("RreluWithNoise"):
        return True
    if "Attention" in name and tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= 2:
        never = tensor.dtype is torch.uint64 and tensor.dim() == 0
        return never or not getattr(node, "_saved_dropout_p", 0.0)
    return name.startswith(("Cudnn", "Miopen", "MkldnnRnn")) and tensor.dtype is torch.uint8


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor."""
    return getattr(tensor, "_local_tensor", tensor) if type(tensor) is not torch.Tensor else tensor
