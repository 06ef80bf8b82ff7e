"""A step's memory as described hardware sees it: what the workload's settings say beyond the trace.

``as_seen_by`` only changes storages; ops, copies and units stay as they are. Its rules are those of the libraries:
bitsandbytes' block-wise 8-bit states, DDP's buckets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from autockpt.schema import Graph, Hardware, Storage, StorageKind, WorkloadSpec
from autockpt.schema.graph import Copy
from autockpt.tracing.kernels.allocator import MIB

# aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: :4096:2:16:8, and 32 MiB from Hopper on; with ROCm
# 32 MiB, and 128 MiB on gfx942, gfx950 and gfx1250.
_WORKSPACE, _LARGE_WORKSPACE = 2 * 4 * MIB + 8 * (16 << 10), 32 * MIB
_ROCM_WORKSPACE, _LARGE_ROCM_WORKSPACE = 32 * MIB, 128 * MIB
_LARGE_ON_ROCM = ((9, 4), (9, 5), (12, 5))
_HANDLES = 2  # one in the thread of forward, one in autograd's
_BUCKET = 25 * MIB  # DistributedDataParallel's bucket_cap_mb
# bitsandbytes: blocks of 256 values share a scale; states of small tensors stay fp32.
_BLOCK, _SMALLEST_8BIT = 256, 4096
_CONVOLUTIONS = "What cuDNN takes for convolutions while they run is not counted."


def capability_of(hardware: Hardware) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU: the file's, else the least of those that know bf16 or do not.

    None for other devices.
    """
    if hardware.kind != "cuda":
        return None
    return hardware.capability or ((8, 0) if "bfloat16" in hardware.matrix_flops else (7, 5))


def workspace_of(kind: str, capability: tuple[int, int] | None) -> int:
    """What a matrix library takes of the allocator's memory for each of its handles; 0 where there is none.

    Handles keep it once it was used. From torch 2.15 on CUDA's take it for one product at a time, so that up to two
    workspaces too many are counted there (https://github.com/pytorch/pytorch/pull/194311).
    An AMD GPU whose description does not tell its architecture counts as one that takes more.
    """
    if kind == "rocm":
        return _LARGE_ROCM_WORKSPACE if capability is None or capability in _LARGE_ON_ROCM else _ROCM_WORKSPACE
    return 0 if capability is None else _LARGE_WORKSPACE if capability >= (9, 0) else _WORKSPACE


def kept_workspaces(device: torch.device) -> tuple[int, ...]:
    """Bytes that matrix libraries keep of the allocator's memory on a local device, by their handles."""
    if device.type != "cuda":
        return ()
    kind = "rocm" if torch.version.hip else "cuda"
    return (workspace_of(kind, torch.cuda.get_device_capability(device)),) * _HANDLES


def as_seen_by(hardware: Hardware, graph: Graph, spec: WorkloadSpec) -> Graph:
    """The graph with the storages that the workload's settings and the device's libraries add or drop.

    Pure: ``graph`` is one cycle as traced for the kind of device. Optimizer states follow ``spec.optimizer`` and
    ``spec.master_weights``; gradients ``keep_gradients`` and ``ddp``.
    """
    if spec.optimizer == "adamw8bit":
        graph = _eight_bit(graph)
    if spec.master_weights:
        graph = _with_master_weights(graph)
    if spec.ddp is not None:
        graph = _with_all_reduce(graph)
    if spec.ddp == "buckets":
        graph = with_buckets(graph)
    if spec.keep_gradients or spec.ddp == "views":
        graph = _with_kept_gradients(graph)
    if workspace := workspace_of(hardware.kind, hardware.capability or capability_of(hardware)):
        graph = with_resident(graph, "matrix workspaces", [workspace] * _HANDLES, "other")
    if hardware.kind in ("cuda", "rocm") and any(op.target.startswith("aten.convolution") for op in graph.ops):
        graph = changed(graph, notes=(*graph.notes, _CONVOLUTIONS))
    return graph


def changed(graph: Graph, **fields: Any) -> Graph:
    """The graph with other fields. (``model_copy`` would take the cached peak along.)"""
    return Graph.model_construct(**{name: getattr(graph, name) for name in Graph.model_fields} | fields)


def with_buckets(graph: Graph) -> Graph:
    """The graph with the buckets that DistributedDataParallel copies gradients into, which it never gives back."""
    whole, rest = divmod(sum(_gradients(graph).values()), _BUCKET)
    return with_resident(graph, "gradient buckets", [_BUCKET] * whole + ([rest] if rest else []), "other")


def _with_all_reduce(graph: Graph) -> Graph:
    """The graph with what DistributedDataParallel sends alongside the last backward: each bucket once its gradients are
    ready, twice its bytes as in a ring of many. The optimizer waits for all of them."""
    gradients, ready = _gradients(graph), dict[int, int]()
    for op in graph.ops:
        if op.phase == "backward":
            made = (*op.inputs, *(out.storage for out in op.outputs))
            ready |= {storage: op.index for storage in made if storage in gradients}
    end = next((op.index for op in graph.ops if op.phase == "optimizer"), len(graph.ops) - 1)
    buckets, filled = list[Copy](), 0
    for storage in (order := sorted(ready, key=lambda storage: ready[storage])):
        filled += gradients[storage]
        if filled >= _BUCKET or storage == order[-1]:
            buckets.append(Copy(direction="ranks", bytes=2 * filled, issued=ready[storage] + 1, awaited=end))
            filled = 0
    return changed(graph, copies=(*graph.copies, *buckets))


def with_resident(graph: Graph, what: str, sizes: list[int], kind: StorageKind) -> Graph:
    """The graph with more storages that are there when the cycle begins; ``what`` names them in ``resident``."""
    first = max((s.id for s in graph.storages), default=-1) + 1
    added = tuple(Storage(id=first + i, bytes=n, birth=-1, death=None, kind=kind) for i, n in enumerate(sizes))
    total = sum(sizes)
    resident = dict(graph.resident)
    resident[what] = resident.get(what, 0) + total
    return changed(
        graph,
        storages=(*graph.storages, *added),
        resident_bytes=graph.resident_bytes + total,
        resident=resident,
    )


def _resized(graph: Graph, sizes: dict[int, int], what: str) -> Graph:
    """The graph with other sizes of some storages (0 drops one); ``what`` names those that are resident."""
    storages, change = [], 0
    for s in graph.storages:
        nbytes = sizes.get(s.id, s.bytes)
        if s.birth < 0:
            change += nbytes - s.bytes
        if nbytes:
            storages.append(s if nbytes == s.bytes else replace(s, bytes=nbytes))
    resident = dict(graph.resident)
    resident[what] = resident.get(what, 0) + change
    return changed(graph, storages=tuple(storages), resident_bytes=graph.resident_bytes + change, resident=resident)


def _gradients(graph: Graph) -> dict[int, int]:
    """Bytes of each gradient that the optimizer step finds, by storage."""
    return {s.id: s.bytes for s in graph.held_gradients()}


def _states(graph: Graph) -> list[Storage]:
    return [s for s in graph.storages if s.birth < 0 and s.kind == "optimizer"]


def _transients(graph: Graph) -> list[Storage]:
    """What the optimizer step makes and drops, other than what it leaves behind."""
    start = next((op.index for op in graph.ops if op.phase == "optimizer"), len(graph.ops))
    return [s for s in graph.storages if s.birth >= start and s.kind == "optimizer" and s.death is not None]


def _eight_bit(graph: Graph) -> Graph:
    """AdamW's states as bitsandbytes keeps them: a byte a value and a scale a block, updated by one kernel."""
    item = 4 if _is_fp32(graph) else 2
    sizes = {}
    for s in _states(graph):
        values = s.bytes // item
        if values >= _SMALLEST_8BIT:
            sizes[s.id] = values + -(-values // _BLOCK) * 4
        elif s.bytes > 8:  # step counters stay as they are
            sizes[s.id] = 4 * values
    sizes |= {s.id: 0 for s in _transients(graph) if s.bytes >= _SMALLEST_8BIT}
    return _resized(graph, sizes, "optimizer states")


def _is_fp32(graph: Graph) -> bool:
    """Whether most bytes of the gradients are fp32."""
    item = {out.storage: getattr(torch, out.dtype).itemsize for op in graph.ops for out in op.outputs}
    total: Counter[int] = Counter()  # by bytes of an element
    for sid, nbytes in _gradients(graph).items():
        total[item.get(sid, 4)] += nbytes
    return total[4] >= total[2]


def _with_master_weights(graph: Graph) -> Graph:
    """fp32 states and temporaries instead of 16-bit ones, and a fp32 copy of every trainable weight."""
    if _is_fp32(graph):
        return graph
    states = [s for s in _states(graph) if s.bytes > 4]
    sizes = {s.id: 2 * s.bytes for s in (*states, *_transients(graph)) if s.bytes > 4}
    graph = _resized(graph, sizes, "optimizer states")
    return with_resident(graph, "master weights", [2 * n for n in _gradients(graph).values()], "optimizer")


def _with_kept_gradients(graph: Graph) -> Graph:
    """Gradients that stay from step to step: what backward makes is added to them and dropped."""
    kept = _gradients(graph)
    storages = tuple(replace(s, death=s.birth) if s.id in kept and s.birth >= 0 else s for s in graph.storages)
    graph = changed(graph, storages=storages)
    return with_resident(graph, "gradients", list(kept.values()), "gradient")
