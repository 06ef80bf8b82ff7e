"""What holds of both choices for the output head: chunked_softmax bit for bit, chunked_loss up to rounding."""

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.policies.lazy_logits import LazyLogits
from autockpt.runtime import attach, remove
from autockpt.schema.choices import RECOMPUTE, Choice, ChunkedLoss, ChunkedSoftmax
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.errors import raises
from tests.policies.heads import (
    LOSSES,
    SCALED,
    UNKNOWN,
    assert_close,
    assert_same,
    away,
    batch,
    both,
    gradients,
    small_llama,
    step,
)
from tests.policies.zoo import CASES, train
from tests.tracing.reference import Real, ops_of, same_names

EXACT, ROUNDED = ChunkedSoftmax(chunks=8), ChunkedLoss(tokens=25)  # of 192 tokens: 24 each; seven chunks and a rest
CHOICES = (EXACT, ROUNDED)
each_choice = pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.kind)
each_case = pytest.mark.parametrize("case", [CASES[n] for n in ("llama", "gpt2", "bert", "t5")], ids=str)


def assert_as_plain(
    choice: Choice,
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module], dict[str, Tensor]] = step,
    tolerance: float = 1e-5,
) -> dict[str, Tensor]:
    """What ``run`` gives under the choice, which is what it gives without."""
    got, wanted = both(make, run, choice)
    if choice.exact:
        assert_same(got, wanted)
    else:
        assert_close(got, wanted, tolerance)
    return got


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@each_case
@each_choice
def test_two_steps(choice, case, dtype):
    """On accelerators, too: see ``tests.gpu.contract``."""
    extra = {"use_cache": False} if case.takes_cache else {}
    assert_as_plain(choice, case.make, lambda m: train(m, case, dtype, **extra), 1e-5 if dtype == "fp32" else 6e-2)


@pytest.mark.parametrize("size", [1, 7, 192, 1000])
def test_any_size_of_a_chunk(size):
    for choice in (ChunkedSoftmax(chunks=size), ChunkedLoss(tokens=size)):
        assert_as_plain(choice, small_llama())


@pytest.mark.parametrize(
    ("choice", "dtype"), [(EXACT, torch.bfloat16), (EXACT, torch.float64), (ROUNDED, torch.float32)], ids=str
)
@pytest.mark.parametrize("name", SCALED)
def test_what_models_do_to_logits_before_the_loss(name, choice, dtype):
    assert_as_plain(choice, lambda: SCALED[name]().to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOSSES, *UNKNOWN])
@pytest.mark.parametrize(
    ("choice", "dtype"), [(EXACT, torch.float32), (EXACT, torch.bfloat16), (ROUNDED, torch.float32)], ids=str
)
def test_whatever_is_done_to_logits(name, choice, dtype):
    def run(model: nn.Module) -> dict[str, Tensor]:
        inputs = batch()
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        assert isinstance(logits, LazyLogits) == ("forward" in vars(model.lm_head))
        loss = {**LOSSES, **UNKNOWN}[name](logits, labels)
        loss.backward()
        return {"loss": loss.detach()} | gradients(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*chunked_loss computes all logits")
        assert_as_plain(choice, lambda: small_llama()().to(dtype), run)


@each_choice
def test_tied_embeddings_and_a_bias_in_the_head(choice):
    def biased() -> nn.Module:
        model = small_llama(tie_word_embeddings=True)()
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 64))
        return model

    assert "gradient lm_head.bias" in assert_as_plain(choice, biased)


@each_choice
@pytest.mark.parametrize("part", ["lm_head", "model"])
def test_frozen_parts(part, choice):
    def frozen() -> nn.Module:
        model = small_llama()()
        model.get_submodule(part).requires_grad_(False)
        return model

    assert_as_plain(choice, frozen)


@each_choice
@pytest.mark.parametrize("way", ["lora", "modules_to_save"])
def test_adapters_on_the_head(way, choice):
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        on_head = {"target_modules": ["q_proj", "lm_head"]} if way == "lora" else {"modules_to_save": ["lm_head"]}
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, **({"target_modules": ["q_proj"]} | on_head))
        model = peft.get_peft_model(small_llama()(), config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_()
        return model

    assert any("lm_head" in name for name in assert_as_plain(choice, adapted))


@each_choice
def test_copies_pickles_and_removal(choice):
    assert_right = assert_same if choice.exact else assert_close
    model, wanted = small_llama()(), step(small_llama()())
    keys, fields = list(model.state_dict()), [set(m.__dict__) for m in model.modules()]
    with attach(model, {"lm_head": choice}):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_right(step(twin), wanted)
            with torch.no_grad():
                twin.lm_head.weight.fill_(float("nan"))
            assert twin(**batch()).loss.isnan() and not model(**batch()).loss.isnan()
            remove(twin)
            assert type(twin(**batch()).logits) is Tensor
        assert list(model.state_dict()) == keys
    assert [set(m.__dict__) for m in model.modules()] == fields
    assert type(model(**batch()).logits) is Tensor
    with attach(model, {"lm_head": choice}):
        assert_right(step(model), wanted)


@each_choice
def test_a_compiled_head_is_plain_and_says_so(choice):
    torch.compiler.reset()
    model = small_llama()()
    wanted = model(**batch()).loss
    with attach(model, {"lm_head": choice}), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for compiled in (copy.deepcopy(model), model):
            compiled.lm_head.compile(backend="eager", fullgraph=True)
            for _ in range(2):
                assert torch.equal(compiled(**batch()).loss, wanted)
    said = [str(w.message) for w in heard if choice.kind in str(w.message)]
    assert choice.exact or (said and all("torch.compile" in text for text in said))


class Headed(nn.Module):
    """Keeps what its head is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.lm_head = nn.Linear(8, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.layers[1](self.layers[0](x))
        return self.lm_head(self.hidden)


@pytest.mark.parametrize(("choice", "tensors"), [(ChunkedSoftmax(chunks=2), 1), (ChunkedLoss(tokens=5), 3)])
def test_sentinels_compare_the_losses_of_each_chunk(choice, tensors):
    """What was written to unseen; not targets, which plain training's backward reads again, too."""
    model = Headed()
    with attach(model, {"lm_head": choice}, sentinels="all") as session:
        for written in ("nothing", "targets", "what is kept"):
            logits, targets = model(torch.randn(12, 8)), torch.arange(12)
            loss = nn.functional.cross_entropy(logits, targets)
            if written == "what is kept":
                (logits if choice.exact else model.hidden).data.mul_(0.5)
                with raises(RerunMismatch, "lm_head"):
                    loss.backward()
                continue
            targets.data += written == "targets" and choice.exact
            loss.backward()
    assert session.sentinels.tensors == 2 * tensors


def test_weights_that_changed_are_an_error():
    model = small_llama()()
    with attach(model, {"lm_head": ROUNDED}):
        out = model(**batch())
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        for use in (out.logits.sum, out.loss.backward):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                use()


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
        got, wanted = both(make, run, ROUNDED)
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

    assert_close(*both(small_llama(), run, ROUNDED))
    ours, plain = seen
    assert away(ours, plain) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16"}, {"autocast": "bf16"}, {"lora": 4}], ids=str)
def test_ghost_run_is_exact(settings, tmp_path):
    config = small_llama(vocab_size=4096)().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = WorkloadSpec(model=str(tmp_path), batch_size=2, seq_len=64, optimizer="sgd", **settings)
    with Tracer.from_spec(spec, fallback=False) as tracer:
        plain = tracer.trace()
        for choice, fewer in ((ChunkedSoftmax(chunks=4), 1), (ChunkedLoss(tokens=32), 2)):
            plan: dict[str, Choice] = {"model.layers.0": RECOMPUTE, "lm_head": choice}
            graph, real = tracer.trace(plan), Real(build(spec), plan)
            assert ops_of(graph) == same_names(real.ops)
            assert graph.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)
            assert graph.peak_bytes < plain.peak_bytes - fewer * 96 * 4096 * 4
