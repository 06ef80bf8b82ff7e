"""chunked_loss against plain training: losses and gradients up to rounding, logits as they are or an error."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from autockpt.errors import RerunMismatch
from autockpt.policies.lazy_logits import LazyLogits
from autockpt.runtime import attach, remove
from autockpt.schema.choices import RECOMPUTE, SAVE, Choice, ChunkedLoss
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.errors import raises
from tests.policies import heads
from tests.policies.heads import LOSSES, SCALED, UNKNOWN, batch, by_trainer, gradients, small_llama, step
from tests.policies.zoo import CASES, train
from tests.tracing.reference import Real, ops_of, peak_over, same_names

CHUNK = ChunkedLoss(tokens=50)  # 384 tokens: seven chunks and a rest
both = functools.partial(heads.both, choice=CHUNK)
pytestmark = pytest.mark.filterwarnings("error:.*chunked_loss computes all logits")
each_case = pytest.mark.parametrize("case", [CASES[n] for n in ("llama", "gpt2", "bert", "t5")], ids=str)


def away(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-12))


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Random states and buffers bit-equal, all else within tolerance of the longest gradient's rounding."""
    assert got.keys() == wanted.keys()
    longest = max((float(t.float().norm()) for n, t in wanted.items() if "gradient" in n), default=0.0)
    for name, tensor in wanted.items():
        if "random" in name or "buffer" in name:
            assert torch.equal(got[name], tensor), name
        elif float(tensor.float().norm()) > 1e-4 * longest or "loss" in name:
            assert away(got[name], tensor) <= tolerance, (name, away(got[name], tensor))


# --- gradients


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@each_case
def test_two_steps_are_equal_up_to_rounding(case, dtype):
    extra = {"use_cache": False} if case.takes_cache else {}
    got, wanted = both(case.make, lambda model: train(model, case, dtype, **extra))
    assert_close(got, wanted, 1e-5 if dtype == "fp32" else 6e-2)


@pytest.mark.parametrize("tokens", [1, 7, 384, 1000])
def test_any_chunk_size(tokens):
    assert_close(*both(small_llama(), step, choice=ChunkedLoss(tokens=tokens)))


def test_16_bit_weights_lose_no_more_than_plain_training():
    exact = step(small_llama()().double())
    got, plain = both(lambda: small_llama()().bfloat16(), step, choice=ChunkedLoss(tokens=8))
    for name in exact:
        assert away(got[name], exact[name]) < 1.1 * away(plain[name], exact[name]) + 1e-3, name


@pytest.mark.parametrize("name", SCALED)
def test_what_models_do_to_logits_before_the_loss(name):
    assert_close(*both(SCALED[name], step))


def test_tied_embeddings_and_a_bias_in_the_head():
    def biased() -> nn.Module:
        model = small_llama(tie_word_embeddings=True)()
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 64))
        return model

    got, wanted = both(biased, step)
    assert "gradient lm_head.bias" in got
    assert_close(got, wanted)


@pytest.mark.parametrize("part", ["lm_head", "model"])
def test_frozen_parts(part):
    def frozen() -> nn.Module:
        model = small_llama()()
        model.get_submodule(part).requires_grad_(False)
        return model

    assert_close(*both(frozen, step))


@pytest.mark.parametrize("way", ["lora", "modules_to_save"])
def test_adapters_on_the_head(way):
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

    got, wanted = both(adapted, step)
    assert any("lm_head" in name for name in got)
    assert_close(got, wanted)


@pytest.mark.parametrize("name", UNKNOWN)
def test_whatever_else_is_done_to_logits_is_right(name):
    def run(model: nn.Module) -> dict[str, Tensor]:
        inputs = batch()
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        assert isinstance(logits, LazyLogits) == ("forward" in vars(model.lm_head))
        loss = UNKNOWN[name](logits, labels)
        loss.backward()
        return {"loss": loss.detach()} | gradients(model)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*chunked_loss computes all logits")
        assert_close(*both(small_llama(), run))


@pytest.mark.slow
def test_trainer_with_accumulation(tmp_path):
    def run(model: nn.Module) -> dict[str, Tensor]:
        inputs = batch()
        rows = [{k: inputs[k][i] for k in ("input_ids", "labels")} for i in range(6)] * 2
        for i, row in enumerate(rows):
            row["labels"] = row["labels"].clone()
            row["labels"][: 5 * i] = -100
        return by_trainer(model, rows, tmp_path)

    got, wanted = both(small_llama(), run)
    plain = dict(small_llama()().named_parameters())
    assert all(away(got[n], wanted[n]) < 1e-5 for n in wanted)
    assert max(away(plain[n], wanted[n]) for n in wanted) > 1e-3


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


SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "the same": lambda x: x.float(),
    "another shape": lambda x: x.view(-1, 64),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_write_to_the_logits_reaches_a_loss_on_the_same_memory(name):
    def run(model: nn.Module) -> dict[str, Tensor]:
        inputs = batch()
        del inputs["labels"]
        logits = model(**inputs).logits
        loss = SHARED[name](logits).pow(2).mean()
        logits.data.mul_(0.5)
        loss.backward()
        return gradients(model)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*chunked_loss computes all logits")
        assert_close(*both(small_llama(), run))


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


def test_a_backward_hook_on_the_model_runs_once():
    calls: list[str] = []

    def run(model: nn.Module) -> dict[str, Tensor]:
        model.register_full_backward_hook(lambda *_: calls.append("backward"))
        loss = model(**batch(), return_dict=False)[0]
        loss.backward()
        return gradients(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(*both(small_llama(), run))
    assert len(calls) == 2


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


# --- attaching


def test_copies_pickles_and_removal():
    model = small_llama()()
    wanted = step(small_llama()())
    keys, fields = list(model.state_dict()), [set(m.__dict__) for m in model.modules()]
    with attach(model, {"lm_head": CHUNK}):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_close(step(twin), wanted)
            with torch.no_grad():
                twin.lm_head.weight.fill_(float("nan"))
            assert twin(**batch()).loss.isnan() and not model(**batch()).loss.isnan()
            remove(twin)
            assert type(twin(**batch()).logits) is Tensor
        assert list(model.state_dict()) == keys
    assert [set(m.__dict__) for m in model.modules()] == fields
    out = model(**batch())
    assert type(out.logits) is Tensor
    with attach(model, {"lm_head": CHUNK}):
        assert_close(step(model), wanted)


# --- memory


def test_peak_holds_one_chunk_of_logits():
    make = small_llama(vocab_size=4096)
    rows, vocabulary = 6 * 64, 4096
    peaks = {}
    for name, choice in (("plain", SAVE), ("chunked", ChunkedLoss(tokens=32))):
        model = make()
        with attach(model, {"lm_head": choice}):
            step(model)
            model.zero_grad()
            peaks[name] = peak_over(lambda m=model: step(m))
    assert peaks["plain"] > 3 * rows * vocabulary * 4
    assert peaks["chunked"] < peaks["plain"] - 3 * (rows - 32) * vocabulary * 4 + 4 * 32 * vocabulary * 4


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"dtype": "bf16"}, {"autocast": "bf16"}, {"lora": 4}], ids=str)
def test_ghost_run_is_exact(settings, tmp_path):
    small_llama(vocab_size=8192)().config.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = WorkloadSpec(model=str(tmp_path), batch_size=2, seq_len=64, optimizer="sgd", **settings)
    plan: dict[str, Choice] = {"model.layers.0": RECOMPUTE, "lm_head": ChunkedLoss(tokens=32)}
    with Tracer.from_spec(spec, fallback=False) as tracer:
        plain, graph = tracer.trace(), tracer.trace(plan)
    real = Real(build(spec), plan)
    assert ops_of(graph) == same_names(real.ops)
    assert graph.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-4)
    assert graph.peak_bytes < plain.peak_bytes - 2 * 96 * 8192 * 4


@pytest.mark.filterwarnings("default")
def test_a_compiled_head_is_plain_and_says_so():
    torch.compiler.reset()
    model, name = small_llama()(), "lm_head"
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=ids, labels=ids, use_cache=False).loss
    with attach(model, {name: CHUNK}), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        model.lm_head.compile(backend="eager", fullgraph=True)
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            assert torch.equal(loss, wanted)
        copied.lm_head.compile(backend="eager", fullgraph=True)
        assert torch.equal(copied(input_ids=ids, labels=ids, use_cache=False).loss, wanted)
    said = [str(w.message) for w in heard if "chunked_loss" in str(w.message)]
    assert said and all("torch.compile" in text for text in said)


@pytest.mark.parametrize("mode", ["off", "all"])
def test_a_compiled_loss_runs_in_chunks_and_uncompiled(mode):
    torch.compiler.reset()

    @torch.compile(backend="aot_eager")
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def run(choice: Choice) -> dict[str, Tensor]:
        model, found = small_llama()(), dict[str, Tensor]()
        ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
        with attach(model, {"lm_head": choice}, sentinels=mode), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*does not know how to trace")
            for _ in range(3):
                loss(model(input_ids=ids, use_cache=False).logits, ids).backward()
            found |= gradients(model)
        return found

    wanted = run(SAVE)
    for name, gradient in run(CHUNK).items():
        torch.testing.assert_close(gradient, wanted[name])


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


def test_backward_under_another_autocast_computes_as_plain_training_does_there():
    def step(model: nn.Module) -> dict[str, Tensor]:
        loss = model(**batch()).loss
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return gradients(model)

    got, wanted = both(small_llama(), step, choice=ChunkedLoss(tokens=1000))
    for name, tensor in wanted.items():
        assert (got[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
