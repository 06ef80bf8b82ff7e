"""chunked_loss against plain training: losses and gradients up to rounding, logits as they are or an error."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.runtime import attach
from autockpt.schema.choices import ChunkedLoss
from tests.errors import raises
from tests.policies import heads
from tests.policies.heads import LOSSES, UNKNOWN, assert_close, away, batch, gradients, small_llama, step

CHUNK = ChunkedLoss(tokens=50)  # 384 tokens: seven chunks and a rest
both = functools.partial(heads.both, choice=CHUNK)
pytestmark = pytest.mark.filterwarnings("error:.*chunked_loss computes all logits")


# --- logits


def test_weights_that_changed_are_an_error():
    model = small_llama()()
    with attach(model, {"lm_head": CHUNK}):
        out = model(**batch())
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.logits.sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.loss.backward()


@pytest.mark.parametrize("why", ["dropout", "backward hook", "forward hook"])
def test_heads_that_need_whole_logits_get_them_with_a_warning(why):
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        model = small_llama()()
        if why == "dropout":
            torch.manual_seed(1)
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["lm_head"]))
        return model

    calls: list[str] = []

    def run(model: nn.Module) -> dict[str, Tensor]:
        head = model.get_output_embeddings()
        if why == "backward hook":
            head.register_full_backward_hook(lambda *_: calls.append("backward"))
        if why == "forward hook":
            head.register_forward_hook(lambda _, __, out: out * torch.ones(64))
        return step(model)

    with pytest.warns(UserWarning, match="chunked_loss computes all logits at once"):
        got, wanted = both(make, run)
    assert_close(got, wanted, 0 if why != "forward hook" else 1e-5)
    assert calls == (["backward"] * 2 if why == "backward hook" else [])


@pytest.mark.parametrize("loss", [LOSSES["shifted"], UNKNOWN["an autograd function"]], ids=["chunks", "whole logits"])
def test_hooks_on_the_weights_get_their_gradient_once(loss):
    seen: list[Tensor] = []

    def run(model: nn.Module) -> dict[str, Tensor]:
        inputs = batch()
        labels = inputs.pop("labels")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient / 2)
            loss(model(**inputs).logits, labels).backward()
        return gradients(model)

    assert_close(*both(small_llama(), run))
    ours, plain = seen
    assert away(ours, plain) <= 1e-5


def test_sentinels_compare_the_losses_of_each_chunk():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.lm_head = nn.Linear(8, 16)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.layers[1](self.layers[0](x))
            return self.lm_head(self.hidden)

    model = Model()
    with attach(model, {"lm_head": ChunkedLoss(tokens=5)}) as session:
        for written in (False, True):
            logits = model(torch.randn(12, 8))
            loss = nn.functional.cross_entropy(logits, torch.arange(12))
            if written:
                model.hidden.data.mul_(0.5)
                with raises(RerunMismatch, "lm_head"):
                    loss.backward()
            else:
                loss.backward()
                assert session.proof().tensors == 3
