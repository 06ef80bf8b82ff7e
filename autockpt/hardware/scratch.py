"""Scratch memory of oneDNN's kernels and of rarer ones, measured: each op runs once for real, on zeros.

What oneDNN takes for a convolution or a 16-bit product (blocked copies, packed panels, sums per thread) is decided when
it picks one of dozens of implementations by shape, instruction set and threads: a depthwise convolution's backward on
2x2 images takes 250 times its weights. No table of rules follows that, one call under the allocator's events does. Ops
whose tensors or arithmetic are too much for a look ahead keep the rules of ``workspaces.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from autockpt.devices.cpu import allocator_peak
from autockpt.hardware.operators import Operator, flat_tensors, overload_of
from autockpt.hardware.signature import TensorSpec, Word, dtype_of, parse_signature, word_value
from autockpt.schema.files import ScratchFolder

# What oneDNN takes for these depends on shapes, threads and the processor; what ATen's own take on layouts besides.
_TRIED = """convolution convolution_backward mkldnn_rnn_layer_backward upsample_nearest1d upsample_nearest2d
_upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa
_upsample_bicubic2d_aa max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward im2col kthvalue roll
_embedding_bag _embedding_bag_backward _trilinear native_group_norm_backward _safe_softmax logsumexp _euclidean_dist
_ctc_loss_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss soft_margin_loss
soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_with_logits"""
_ALWAYS = frozenset(_TRIED.split())
_IN_16_BITS = frozenset({"sum", "mean", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "gemm_4bit"})
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # packs its blocks by oneDNN's products
_ATTENTIONS = frozenset({_ATTENTION, f"{_ATTENTION}_backward"})
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
# One op, and all ops of a tracer. Limits on work and not on time, so that a busy machine predicts the same bytes.
_MOST_BYTES = 1 << 29
_MOST_FLOPS, _MOST_FLOPS_TOGETHER = 3e10, 2e11
_SECONDS = 300.0
GIVEN_UP = (
    "What the largest convolutions, resamplings, losses and 16-bit products take while they run was not tried out: "
    "convolutions and attention are estimated, the others count as nothing."
)


class _Call(Protocol):
    """One signature: ``trial`` is the text to call it by again, ``workspace`` bytes that are to be found out."""

    trial: str
    flops: int
    workspace: int


class WorkspaceTrials:
    """Calls whose workspace is to be measured; ``given_up``: those that keep what the rules say."""

    def __init__(self) -> None:
        self.given_up: set[Any] = set()
        self._waiting: list[_Call] = []
        self._flops = 0.0

    def add(self, call: _Call) -> None:
        """Have a call measured the next time."""
        self._waiting.append(call)

    def run(self, threads: int) -> None:
        """Measure what has been added since, and set ``workspace``."""
        waiting, self._waiting = self._waiting, []
        found = measured_bytes([call.trial for call in waiting if self._affordable(call)], threads)
        for call in waiting:
            if call.trial in found:
                call.workspace = found[call.trial]
            else:
                self.given_up.add(call)

    def _affordable(self, call: _Call) -> bool:
        together = self._flops + call.flops
        if call.flops > _MOST_FLOPS or together > _MOST_FLOPS_TOGETHER or _tensor_bytes(call.trial) > _MOST_BYTES:
            return False
        self._flops = together
        return True


def is_measured(operator: Operator, tensors: list[Tensor]) -> bool:
    """Whether only a real call tells what the CPU kernel takes while it runs."""
    if operator.base in _ALWAYS:
        return True
    packs = operator.multiplies or operator.base in _ATTENTIONS
    if not (operator.base in _IN_16_BITS or (packs and torch.backends.mkldnn.is_available())):
        return False
    return bool(tensors) and tensors[0].dtype in _SIXTEEN_BIT


def measured_bytes(signatures: Iterable[str], threads: int) -> dict[str, int]:
    """Bytes beyond its results that each op holds at its worst moment, by signature, with ``threads`` threads.

    Runs the ops in this process if it has that many threads, else in a fresh one. What cannot be called, or not
    measured, is left out.
    """
    wanted = list(dict.fromkeys(signatures))
    if not wanted:
        return {}
    if threads == torch.get_num_threads():
        return {text: nbytes for text in wanted if (nbytes := _measure(text)) is not None}
    return _in_fresh_process(wanted, threads)


def _tensor_bytes(signature: str) -> int:
    """Bytes of the tensors that a call of this signature takes."""
    return sum(_span(spec) * dtype_of(spec.dtype).itemsize for spec in parse_signature(signature).tensors())


def _measure(signature: str) -> int | None:
    try:
        call = parse_signature(signature)
        function = overload_of(call.target)
        args = [_real(value) for value in call.args]
        kwargs = {name: _real(value) for name, value in call.kwargs.items()}
        results: list[Any] = []
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            most = allocator_peak(lambda: results.append(function(*args, **kwargs)))
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError, MemoryError):
        return None  # the rule stands
    made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flat_tensors(results)}
    return max(most - sum(made.values()), 0)


def _real(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        flat = torch.zeros(_span(value), dtype=dtype_of(value.dtype))
        return flat.as_strided(value.shape, value.stride)
    if isinstance(value, Word):
        return word_value(value)
    return [_real(item) for item in value] if isinstance(value, list) else value


def _span(spec: TensorSpec) -> int:
    """Elements from a tensor's first to its last."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))


def _in_fresh_process(wanted: list[str], threads: int) -> dict[str, int]:
    """Forked children cannot start OpenMP's threads again, so as many threads take a process of their own."""
    with ScratchFolder() as folder:
        question, answer = Path(folder, "question"), Path(folder, "answer")
        question.write_text(json.dumps(wanted))
        program = "import sys; from autockpt.hardware.scratch import main; main(*sys.argv[1:])"
        command = [sys.executable, "-c", program, str(threads), str(question), str(answer)]
        paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "KINETO_LOG_LEVEL": "99"}
        try:
            subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS)
            return json.loads(answer.read_text())
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return {}


def main(threads: str, question: str, answer: str) -> None:
    """Entry of the fresh process: a JSON list of signatures in, their bytes out."""
    torch.set_num_threads(int(threads))
    wanted = json.loads(Path(question).read_text())
    Path(answer).write_text(json.dumps(measured_bytes(wanted, torch.get_num_threads())))
