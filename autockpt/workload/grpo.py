"""The training pass of TRL's GRPOTrainer and RLOOTrainer, described: no trainer has to run for a plan.

These trainers (TRL 1.x) generate completions and score them without gradients, and then train on micro-batches of
prompts and completions. Their models get an output head of their own: it makes no logits but log-probabilities, from
tiles of logits that backward makes again. Here are its tensors, tile by tile; TRL itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TOKENS, COLUMNS = 4096, 32768  # of a tile of logits
# On a CPU, where no kernel folds a tile in place, TRL's backward holds seven copies in fp32 and a mask at once.
_COPIES_ON_CPU = 7 * 4 + 1
_CLIP = 0.2

NOTE = (
    "The step is the training pass of TRL's GRPOTrainer or RLOOTrainer. It leaves out generation with its KV cache "
    "and a reference model of its own, which there is with `beta` above zero and no adapters."
)

launch: Callable[..., None] | None = None
"""Ghost runs for CUDA set this. It stands for a launch of TRL's Triton kernel over a tile."""


def score_completions(model: nn.Module, prompt: int) -> None:
    """Let a causal language model return log-probabilities: of the tokens behind ``prompt``.

    To be called before adapters are attached.
    """
    model.forward = partial(_scored, model, prompt)


def with_prompts(batch: dict[str, Tensor], prompt: int) -> dict[str, Tensor]:
    """A batch of right-padded sequences as one of left-padded prompts, and completions all as long as may be."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).flip(1)
    mask[:, prompt:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def policy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The clipped objective, for advantages that all are 1, on one update of each generation."""
    scores = model(**batch)
    ratio = torch.exp(scores - scores.detach())
    return -torch.min(ratio, ratio.clamp(1 - _CLIP, 1 + _CLIP)).mean()


def _scored(model: Any, prompt: int, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
    output = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    hidden, targets = output.last_hidden_state[:, :-1], input_ids[:, 1:]
    if launch is not None or hidden.device.type != "cpu":  # without the kernel all positions are scored
        hidden, targets = hidden[:, prompt - 1 :], targets[:, prompt - 1 :]
    weight = model.get_output_embeddings().weight
    scores = _LogProbabilities.apply(hidden.reshape(-1, hidden.size(-1)), weight, targets.reshape(-1))
    return scores.view(targets.shape)[:, prompt - input_ids.size(1) :]


class _LogProbabilities(torch.autograd.Function):
    """Log-probabilities of targets. Logits, and their gradients, exist for one tile at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        top, total, chosen, *_ = hidden.new_zeros((7, len(hidden)), dtype=torch.float32)  # as many as TRL's kernel has
        top.fill_(float("-inf"))
        for tile in _tiles(ctx.dtype, hidden, weight):
            rows, logits = tile.rows, tile.logits
            if launch is not None:
                launch(logits, targets[rows], top[rows], total[rows], chosen[rows])
                continue
            inside, at = tile.places(targets)
            chosen[rows] += logits.gather(1, at)[:, 0] * inside
            most = torch.maximum(top[rows], logits.amax(-1))
            total[rows] *= torch.exp(top[rows] - most)
            total[rows] += logits.sub_(most[:, None]).exp_().sum(-1, dtype=torch.float32)
            top[rows] = most
        total = top + total.log()
        ctx.save_for_backward(hidden, weight, targets, total)
        return chosen - total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, targets, total = ctx.saved_tensors
        of_hidden, of_weight = (
            torch.zeros_like(tensor, dtype=torch.float32) if wanted else None
            for tensor, wanted in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        )
        for tile in _tiles(ctx.dtype, hidden, weight):
            rows, logits = tile.rows, tile.logits
            if launch is not None:
                launch(logits, targets[rows], total[rows], gradient[rows])
            else:
                on_cpu = logits.device.type == "cpu"
                copies = logits.new_empty(on_cpu * _COPIES_ON_CPU * logits.numel(), dtype=torch.uint8)
                inside, at = tile.places(targets)
                logits.sub_(total[rows, None]).exp_().mul_(-gradient[rows, None])
                logits.scatter_add_(1, at, (gradient[rows] * inside).to(logits.dtype)[:, None])
                del copies
            if of_hidden is not None:
                _add_product(of_hidden[rows], logits, tile.weight)
            if of_weight is not None:
                _add_product(of_weight[tile.columns], logits.t(), tile.hidden)
        return *(g if g is None else g.to(t.dtype) for g, t in ((of_hidden, hidden), (of_weight, weight))), None


class _Tile(NamedTuple):
    """Logits of some rows and some columns, with the states and the weights that they are the product of."""

    rows: slice
    columns: slice
    hidden: Tensor
    weight: Tensor
    logits: Tensor

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows have their target in these columns, and where; the others an arbitrary place."""
        at = targets[self.rows] - self.columns.start
        return (at >= 0) & (at < len(self.weight)), at.clamp(0, len(self.weight) - 1)[:, None]


def _tiles(dtype: torch.dtype, hidden: Tensor, weight: Tensor) -> Iterator[_Tile]:
    buffer = hidden.new_empty((min(len(hidden), TOKENS), COLUMNS), dtype=dtype)  # as wide for small vocabularies, too
    for row in range(0, len(hidden), TOKENS):
        rows = slice(row, row + TOKENS)
        states = hidden[rows].to(dtype)
        for column in range(0, len(weight), COLUMNS):
            columns = slice(column, column + COLUMNS)
            part = weight[columns].to(dtype)
            logits = torch.mm(states, part.t(), out=buffer[: len(states), : len(part)])
            yield _Tile(rows, columns, states, part, logits)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a product to fp32 sums, on CUDA without copies of its factors in fp32."""
    if a.dtype.itemsize < 4 and (launch is not None or a.device.type == "cuda"):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
