"""chunked_softmax against plain training: bit-equal whatever is done to logits, or a refusal; and what it saves."""

import functools
import gc
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.policies.lazy_logits import LazyLogits
from autockpt.runtime import attach
from autockpt.schema.choices import ChunkedLoss, ChunkedSoftmax
from tests.errors import raises
from tests.policies import heads
from tests.policies.heads import assert_same, batch, gradients, small_llama, step
from tests.policies.zoo import CASES, precision
from tests.tracing.reference import peak_over

CHUNK = ChunkedSoftmax(chunks=8)  # of 192 tokens: 24 each
F = nn.functional
both = functools.partial(heads.both, choice=CHUNK)
# --- gradients


@pytest.mark.slow
@given(
    rows=st.integers(1, 70),
    vocabulary=st.integers(1, 40),
    chunks=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore=st.integers(-3, 5),
    steps=st.sampled_from([lambda x: x, Tensor.float, lambda x: torch.tanh(x / 3) * 2]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_cross_entropy_is_bit_equal(rows, vocabulary, chunks, dtype, reduction, ignore, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(3, vocabulary).to(dtype)
    hidden = (torch.randn(1, rows, 3, generator=generator) * 9).to(dtype).requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.3] = ignore
    if not 0 <= ignore < vocabulary:
        ignore = min(ignore, -1)
        target[target >= vocabulary] = ignore

    def run() -> list[Tensor]:
        logits = steps(head(hidden)).view(-1, vocabulary)
        loss = F.cross_entropy(logits, target, ignore_index=ignore, reduction=reduction)
        loss = loss if loss.dim() == 0 else (loss * torch.arange(rows)).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])]

    wanted = run()
    with attach(nn.ModuleDict({"head": head}), {"head": ChunkedSoftmax(chunks=chunks)}):
        assert isinstance(head(hidden), LazyLogits)
        got = run()
    assert all(torch.equal(g.nan_to_num(7), w.nan_to_num(7)) for g, w in zip(got, wanted, strict=True))


def two_losses(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x[0], y[0]) + F.cross_entropy(x[1:].flatten(0, 1), y[1:].flatten())


@pytest.mark.parametrize("loss_of", [two_losses, heads.UNKNOWN["both"]], ids=["two losses", "a loss and more"])
def test_two_ways_through_a_cast_are_refused(loss_of):
    def run(model: nn.Module, cast: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
        inputs = batch()
        labels = inputs.pop("labels")
        loss = loss_of(cast(model(**inputs).logits), labels)
        loss.backward()
        return {"loss": loss.detach()} | gradients(model)

    assert_same(*both(lambda: small_llama()().bfloat16(), run))
    with raises(ConflictError, "cross-entropy"):
        both(lambda: small_llama()().bfloat16(), lambda model: run(model, Tensor.float))


def test_one_graph_twice_and_one_differentiated_twice():
    def run(model: nn.Module) -> dict[str, Tensor]:
        loss = model(**batch()).loss
        some = torch.autograd.grad(loss, model.model.norm.weight, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model) | {"some": some[0]}

    assert_same(*both(small_llama(), run))
    model = small_llama(attn_implementation="eager")()
    with attach(model, {"lm_head": CHUNK}), raises(ConflictError, "chunked_softmax"):
        torch.autograd.grad(model(**batch()).loss, [model.lm_head.weight], create_graph=True)


# --- logits


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", [CASES[n] for n in ("llama", "gpt2", "bert", "t5")], ids=str)
def test_logits_can_be_read_before_and_after_backward(case, when):
    extra = {"use_cache": False} if case.takes_cache else {}

    def run(model: nn.Module) -> dict[str, Tensor]:
        out = model(**case.batch(), **extra)
        if when == "before":
            best, logits = out.logits.argmax(-1), out.logits.detach().clone()
            out.loss.backward()
        else:
            out.loss.backward()
            best, logits = out.logits.argmax(-1), out.logits.detach()
        return {"best": best, "logits": logits} | gradients(model)

    assert_same(*both(case.make, run))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plain_without_gradients(dtype):
    model = small_llama()().eval()
    with attach(model, {"lm_head": CHUNK}), torch.no_grad(), precision(dtype):
        assert type(model(**batch()).logits) is Tensor
        generated = model.generate(batch()["input_ids"][:2, :8], max_new_tokens=4, do_sample=False)
    with torch.no_grad(), precision(dtype):
        assert torch.equal(generated, model.generate(batch()["input_ids"][:2, :8], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("change", [lambda x: x.zero_(), lambda x: x.detach().zero_()], ids=["itself", "detached"])
def test_logits_that_were_changed_since_are_an_error(change):
    model = small_llama()()
    with attach(model, {"lm_head": CHUNK}):
        out = model(**batch())
        with torch.no_grad():
            change(out.logits)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.loss.backward()


def _retained(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    logits.retain_grad()
    loss(logits).backward(retain_graph=True)
    assert logits.retains_grad
    return loss(logits) + logits.grad.abs().sum()


def _written_before(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    logits.data.mul_(0.5)
    return loss(logits)


def _read_beside(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    cast, before = logits.double(), loss(logits)
    hits = (logits.data.argmax(-1) == logits.detach().numpy().argmax(-1)).float().mean()
    return before + 0 * hits if cast.dim() == 3 else before


@pytest.mark.parametrize("choice", [CHUNK, ChunkedLoss(tokens=48)], ids=lambda c: c.kind)
@pytest.mark.parametrize("do", [_retained, _written_before, _read_beside])
def test_writes_that_plain_training_sees_too(do, choice):
    def run(model: nn.Module) -> dict[str, Tensor]:
        labels = batch()["labels"].flatten()
        loss = do(model(**batch(labels=None)).logits, lambda logits: F.cross_entropy(logits.view(-1, 64), labels))
        loss.backward()
        return {"loss": loss.detach(), **gradients(model)}

    got, wanted = heads.both(small_llama(), run, choice)
    for name, tensor in wanted.items():
        assert (
            torch.allclose(got[name], tensor, rtol=1e-4, atol=1e-7)
            if choice.kind == "chunked_loss"
            else torch.equal(got[name], tensor)
        ), name


@pytest.mark.parametrize("use", ["hook", "retain_grad", "grad"])
def test_gradients_of_the_logits_are_those_of_plain_training(use):
    def run(model: nn.Module) -> dict[str, Tensor]:
        out, seen = model(**batch()), []
        if use == "hook":
            out.logits.register_hook(seen.append)
        elif use == "retain_grad":
            out.logits.retain_grad()
        else:
            seen.extend(torch.autograd.grad(out.loss, out.logits, retain_graph=True))
        out.loss.backward()
        return {"logits": seen[0] if seen else out.logits.grad} | gradients(model)

    assert_same(*both(small_llama(), run))


@pytest.mark.parametrize(
    "use", [lambda x: x.register_hook(print), Tensor.retain_grad, Tensor.zero_], ids=["hook", "retain_grad", "zero_"]
)
def test_what_needs_a_cast_as_a_whole_after_its_loss_is_refused(use):
    model = small_llama()()
    with attach(model, {"lm_head": CHUNK}):
        cast = model(**batch(labels=None)).logits.double()
        F.cross_entropy(cast.view(-1, 64), batch()["labels"].view(-1))
        with raises(ConflictError, "lm_head", "chunked_softmax"):
            use(cast)


# --- memory


def test_nothing_waits_for_the_garbage_collector():
    model = small_llama(vocab_size=4096)()
    with attach(model, {"lm_head": CHUNK}):
        for _ in range(2):  # which sentinels watch
            step(model)
        gc.collect()
        gc.disable()
        try:
            before = peak_over(lambda: step(model))
            for _ in range(2):  # the last of all is no checked call
                step(model)
            assert peak_over(lambda: step(model)) == before
        finally:
            gc.enable()


def test_a_compiled_loss_is_refused_as_its_bits_are_others():
    torch.compiler.reset()
    loss = torch.compile(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), backend="aot_eager")
    model = small_llama()()
    with attach(model, {"lm_head": CHUNK}), raises(ConflictError, "lm_head"):
        loss(model(**batch(labels=None)).logits, batch()["labels"])
