"""Memory snapshots with the structure of ``torch.cuda.memory._snapshot``, made up."""

from __future__ import annotations

import pickle
from typing import Any

MIB = 2**20
SITE = "/opt/venv/lib/python3.11/site-packages"


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


MAIN = frame("/home/me/train.py", 30, "main")
# innermost first, as torch writes them
LOADED = [
    frame(f"{SITE}/torch/nn/modules/module.py", 1329, "convert"),
    frame(f"{SITE}/torch/nn/modules/module.py", 915, "_apply"),
    frame(f"{SITE}/torch/nn/modules/module.py", 1355, "to"),
    MAIN,
]
MLP = [
    frame(f"{SITE}/torch/nn/modules/linear.py", 125, "forward"),
    frame(f"{SITE}/torch/nn/modules/module.py", 1784, "_call_impl"),
    frame(f"{SITE}/transformers/models/llama/modeling_llama.py", 155, "forward"),
    frame(f"{SITE}/torch/nn/modules/module.py", 1784, "_call_impl"),
    MAIN,
]
LOSS = [
    frame(f"{SITE}/transformers/loss/loss_utils.py", 55, "ForCausalLMLoss"),
    frame(f"{SITE}/transformers/models/llama/modeling_llama.py", 499, "forward"),
    MAIN,
]
STATES = [
    frame(f"{SITE}/torch/optim/adamw.py", 175, "_init_group"),
    frame(f"{SITE}/torch/optim/adamw.py", 232, "step"),
    MAIN,
]
ENGINE = [frame("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<ReadyQueue> const&)")]


def block(
    address: int, size: int, frames: Any = None, state: str = "active_allocated", asked: int = 0
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": asked or size,
        "state": state,
        "frames": frames if frames is not None else [],
    }


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    size = sum(b["size"] for b in blocks)
    active = sum(b["size"] for b in blocks if b["state"] != "inactive")
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def event(action: str, address: int, size: int, frames: Any = None) -> dict[str, Any]:
    out = {"action": action, "size": size, "stream": 0, "time_us": 1_000_000, "pool_id": (0, 0), "frames": frames or []}
    return out | ({"device_free": address} if action == "oom" else {"addr": address})


def training_oom() -> dict[str, Any]:
    """A forward pass that fails: 400 MiB of weights, 800 of optimizer states, activations, then logits too many.

    After the failure Python unwinds and 300 MiB of activations are freed, before the snapshot is taken.
    """
    base, mib = 0x7F0000000000, MIB
    weights, states, kept, gone = base, base + 400 * mib, base + 1200 * mib, base + 1300 * mib
    segments = [
        segment(base, [block(weights, 400 * mib, LOADED), block(states, 800 * mib, STATES)]),
        segment(
            kept,
            [
                block(kept, 100 * mib, MLP, asked=100 * mib - 300),
                block(gone, 300 * mib, state="inactive"),
                block(base + 1600 * mib, 60 * mib, ENGINE),
                block(base + 1660 * mib, 40 * mib, state="inactive"),
            ],
        ),
    ]
    trace = [
        event("segment_alloc", base, 1200 * mib),
        event("alloc", weights, 400 * mib, LOADED),
        event("alloc", states, 800 * mib, STATES),
        event("segment_alloc", kept, 500 * mib),
        event("alloc", base + 1600 * mib, 60 * mib, ENGINE),
        event("alloc", kept, 100 * mib - 300, MLP),
        event("alloc", gone, 300 * mib, MLP),
        event("oom", 120 * mib, 500 * mib, LOSS),
        event("free_requested", gone, 300 * mib, [MAIN]),
        event("free_completed", gone, 300 * mib, [MAIN]),
        event("snapshot", 0, 0),
    ]
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1},
        "external_annotations": [],
    }


def dumped(data: Any, protocol: int | None = None) -> bytes:
    return pickle.dumps(data, protocol=protocol)
