"""What every policy in the table must do; new ones are found there without being named here."""

import copy
import functools
import gc
import io
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from autockpt.checkpointing.kv_cache import DroppedCache
from autockpt.policies import POLICIES
from autockpt.runtime import attach, remove
from autockpt.schema.choices import CHOICE_TYPES, Choice, parse_choice
from tests.device import DEVICE
from tests.policies.deferred import DeferredTransport, always
from tests.policies.zoo import (
    CASES,
    KINDS,
    Case,
    Row,
    assert_as_plain,
    assert_equal,
    bytes_alive_after,
    in_turn,
    objects_alive_after,
    on,
    plain,
    precision,
    train,
)

pytestmark = pytest.mark.slow

NO_CACHE = {"use_cache": False}

DTYPES = ("fp32", "bf16")
FEW = [CASES[n] for n in ("gpt2", "t5", "cnn", "sequential")]
LANGUAGE = [CASES[n] for n in ("llama", "gpt2", "t5")]

each_case = pytest.mark.parametrize("case", CASES.values(), ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def reference(case: Case, dtype: str) -> dict[str, Tensor]:
    return plain(case, dtype)


def planned(case: Case, kind: str) -> tuple[nn.Module, dict[str, Choice]]:
    model = case.make()
    return model, case.choices(model, parse_choice(kind))


def step(case: Case, model: nn.Module, **extra: Any) -> Tensor:
    return case.step(model, case.batch(), **(NO_CACHE if case.takes_cache else {}), **extra)


def steps(case: Case, model: nn.Module, dtype: str = "fp32", **more: Any) -> dict[str, Tensor]:
    return train(model, case, dtype, **(NO_CACHE if case.takes_cache else {}), **more)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_table_and_union_agree():
    assert set(POLICIES) == {*CHOICE_TYPES}


@pytest.mark.parametrize(
    ("case", "kind", "dtype"),
    [(case, kind, DTYPES[(i + j) % 2]) for i, case in enumerate(CASES.values()) for j, kind in enumerate(KINDS)],
    ids=str,
)
def test_two_steps_are_bit_equal_and_copies_are_waited_for(case, kind, dtype):
    """With copies that arrive as late as they may; with a device's own transports, see ``test_architectures``."""
    model, choices = planned(case, kind)
    transport = DeferredTransport()
    with attach(model, choices, transport=always(transport)) as session:
        # the cache changes the order of sums; only a plan that attaches something switches it off by itself
        extra = NO_CACHE if case.takes_cache and session.guard is None else {}
        assert_equal(train(model, case, dtype, **extra), reference(case, dtype))
    assert transport.pieces_in_use() == 0


@each_case
def test_every_choice_beside_every_other(case):
    model = case.make()
    mixed = {name: parse_choice(KINDS[i % len(KINDS)]) for i, name in enumerate(case.units(model))}
    with attach(model, mixed, transport=always(DeferredTransport())):
        assert_equal(train(model, case, "bf16"), reference(case, "bf16"))


def _accumulation(run: Callable[[], Tensor], model: nn.Module) -> None:
    for _ in range(3):
        (run() / 3).backward()


def _autograd_grad(run: Callable[[], Tensor], model: nn.Module) -> dict[str, Tensor]:
    some = dict(list(model.named_parameters())[2:5])
    return dict(zip(some, torch.autograd.grad(run(), list(some.values())), strict=True))


def _two_forwards_in_one_autocast(run: Callable[[], Tensor], model: nn.Module) -> None:
    with precision("bf16"):
        loss = run() + run()
    loss.backward()


def _backward_inside_autocast(run: Callable[[], Tensor], model: nn.Module) -> None:
    with precision("bf16"):
        run().backward()
        run().backward()


def _graphs_freed_in_another_order(run: Callable[[], Tensor], model: nn.Module) -> None:
    first, second, third = run(), run(), run()
    second.backward()
    del first
    third.backward()


def _forward_without_backward(run: Callable[[], Tensor], model: nn.Module) -> None:
    run()
    run().backward()


def _exception_in_forward(run: Callable[[], Tensor], model: nn.Module) -> None:
    last = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))][-3]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = last.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run()
    hook.remove()
    run().backward()


def _graph_used_twice(run: Callable[[], Tensor], model: nn.Module) -> None:
    loss = run()
    loss.backward(retain_graph=True)
    loss.backward()


def _evaluation_between(run: Callable[[], Tensor], model: nn.Module) -> None:
    loss = run()
    model.eval()
    with torch.no_grad():
        run()
    model.train()
    loss.backward()


def _evaluation_with_gradients(run: Callable[[], Tensor], model: nn.Module) -> None:
    model.eval()
    run().backward()


Scenario = Callable[[Callable[[], Tensor], nn.Module], dict[str, Tensor] | None]
SCENARIOS: list[Scenario] = [
    v for n, v in list(globals().items()) if n.startswith("_") and getattr(v, "__module__", "") == __name__
]


def played(scenario: Scenario, case: Case, model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(5)
    found = scenario(functools.partial(step, case, model), model) or gradients(model)
    return found | dict(model.named_buffers())


plain_scenario = functools.cache(lambda scenario, case: played(scenario, case, case.make()))


@pytest.mark.parametrize(
    ("scenario", "kind", "case"),
    [(f, kind, FEW[(i + j) % len(FEW)]) for i, f in enumerate(SCENARIOS) for j, kind in enumerate(KINDS)],
    ids=lambda value: value.__name__.strip("_") if callable(value) else str(value),
)
def test_is_bit_equal_in(scenario, case, kind):
    wanted = plain_scenario(scenario, case)
    model, choices = planned(case, kind)
    transport = DeferredTransport()
    with attach(model, choices, transport=always(transport)):
        assert_equal(played(scenario, case, model), wanted)
    assert transport.pieces_in_use() == 0


@each_kind
def test_double_backward(kind):
    case = CASES["sequential"]

    def penalty(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(5)
        x = case.batch().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        return gradients(model)

    model, choices = planned(case, kind)
    wanted = penalty(case.make())
    with attach(model, choices):
        assert_equal(penalty(model), wanted)


@in_turn(CASES.values())
def test_keeps_less_in_training_and_in_evaluation(case, kind):
    model, choices = planned(case, kind)
    single = case.name == "sequential"
    for training in (True, False):
        model.train(training)
        step(case, model)
        free = bytes_alive_after(lambda: step(case, model))
        with attach(model, choices) as session:
            step(case, model)
            kept = bytes_alive_after(lambda: step(case, model))
            if session.guard is None or kind == "compile_budget":  # which is for compiled steps
                assert kept <= free
            else:
                # where matrix products are kept, nothing may be left to drop of a unit that is little more than one
                assert kept < (1.05 if single else 0.85) * free


@pytest.mark.parametrize("kind", ["recompute", "recompute_offload", "keep_attention", "segment", "remake"])
def test_less_for_pythons_collector_than_plain_checkpointing(kind):
    case = CASES["llama"]
    model, choices = planned(case, kind)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = 0.0  # with which `remake` notes each call op by op
    with attach(model, choices):
        ours = objects_alive_after(lambda: step(case, model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert ours < objects_alive_after(lambda: step(case, model))


@in_turn(CASES.values())
def test_does_nothing_without_gradients(case, kind):
    model, choices = planned(case, kind)
    model.eval()
    transport = DeferredTransport()
    with torch.no_grad():
        wanted = case.step(model, case.batch())
        with attach(model, choices, transport=always(transport)):
            assert torch.equal(case.step(model, case.batch()), wanted)
    assert transport.queues.sent == 0


@in_turn(LANGUAGE, 1)
def test_generates_with_its_cache(case, kind):
    model, choices = planned(case, kind)
    model.eval()
    ids = case.batch()["input_ids"][:2, :8]
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    with attach(model, choices):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), wanted)
        with torch.no_grad():
            assert model(**case.batch()).past_key_values is not None
        if kind != "save":
            assert type(model(**case.batch()).past_key_values) is DroppedCache


@in_turn(CASES.values(), 1)
def test_leaves_the_model_as_it_was(case, kind):
    model, choices = planned(case, kind)

    def look() -> Any:
        return (
            type(model),
            list(model.state_dict()),
            [n for n, _ in model.named_parameters()],
            [(n, type(m), len(m._forward_hooks) + len(m._forward_pre_hooks)) for n, m in model.named_modules()],
            model.config.to_dict() if hasattr(model, "config") else None,
        )

    def instance_fields() -> list[set[str]]:
        return [set(m.__dict__) for m in model.modules()]

    steps(case, model)  # transformers writes a problem_type into the config at the first loss
    before, fields = look(), instance_fields()
    session = attach(model, choices)
    assert look() == before
    session.remove()
    session.remove()
    assert instance_fields() == fields
    with attach(model, choices):
        steps(case, model)
        assert look() == before
    assert look() == before
    assert instance_fields() == fields
    model.load_state_dict(case.make().state_dict())
    with attach(model, choices):
        assert_equal(steps(case, model), reference(case, "fp32"))


@in_turn(CASES.values(), 1)
def test_shallow_copies_run_as_themselves(case, kind):
    model, choices = planned(case, kind)
    with attach(model, choices):
        for name, module in list(model.named_modules()):
            if name in choices:
                parent, _, last = name.rpartition(".")
                model.get_submodule(parent)._modules[last] = copy.copy(module)
        assert_equal(steps(case, model), reference(case, "fp32"))


@in_turn(CASES.values(), 1)
def test_copies_and_pickles_run_their_own_weights(case, kind):
    model, choices = planned(case, kind)
    with attach(model, choices) as session:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            attached = session.guard is not None
            assert (twin.__dict__.get("forward") is not None) == attached
            assert_equal(steps(case, twin), reference(case, "fp32"))
            with torch.no_grad():
                for p in twin.parameters():
                    p.fill_(float("nan"))
            assert torch.isnan(step(case, twin))
            assert not torch.isnan(step(case, model))
            remove(twin)
            assert not any("forward" in m.__dict__ for m in twin.modules())
    assert not any("forward" in m.__dict__ for m in model.modules())


@in_turn(LANGUAGE, 1)
def test_saves_the_users_own_config(case, kind, tmp_path):
    model, choices = planned(case, kind)
    model.save_pretrained(tmp_path / "before")
    with attach(model, choices):
        step(case, model).backward()
        model.save_pretrained(tmp_path / "during")
    texts = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("before", "during")]
    assert texts[0] == texts[1]
    again = type(model).from_pretrained(tmp_path / "during").to(DEVICE)
    assert_equal(again.state_dict(), model.state_dict())


PAIR = ("units.0", "units.1")


def pair(between: Callable[[Tensor], Any] = id) -> nn.Module:
    torch.manual_seed(0)
    return Row(lambda: nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), 2, between).to(DEVICE)


def rows() -> Tensor:
    return torch.randn(128, 64).to(DEVICE)


@each_kind
def test_nothing_of_a_call_outlives_its_graph(kind):
    """By reference count alone."""
    seen: list[weakref.ref[Any]] = []
    model = pair(lambda out: seen.append(weakref.ref(out.untyped_storage())))
    with attach(model, on(PAIR, kind), transport=always(DeferredTransport())):
        gc.disable()
        try:
            for _ in range(8):
                x = rows()
                seen[:] = [weakref.ref(x.untyped_storage())]
                out = model(x)
                del x, out
                assert all(storage() is None for storage in seen)
        finally:
            gc.enable()


class Noting(nn.Sequential):
    """Notes auxiliary losses, which nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x * 2).mean()
        self.losses.append((self.last, 1))
        return super().forward(x)


@each_kind
def test_what_a_unit_notes_of_a_call_goes_with_the_next(kind):
    model = Row(lambda: Noting(nn.Linear(64, 64), nn.Sigmoid()), 2, id).to(DEVICE)
    seen: list[weakref.ref[Any]] = []
    with attach(model, on(PAIR, kind)):
        for _ in range(5):
            for unit in model.units:
                unit.losses = []
            x = rows()
            seen.append(weakref.ref(x.untyped_storage()))
            model(x).sum().backward()
    assert all(storage() is None for storage in seen[:-1])


class Listing(nn.Module):
    """Its two layers note outputs in lists, which may be one, and whose lengths decide what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def share(self, how: bool | None) -> None:
        """One list for both layers or not; None: no list."""
        self.first.log = None if how is None else []
        self.second.log = self.first.log if how or how is None else []

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first):
            x = layer(x).sigmoid()
            layer.log.append(x.mean())
            x = x * len(layer.log)
        return x


@each_kind
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, None)])
def test_lists_of_graphs_are_shared_as_in_the_forward(kind, before, after):
    def gradients_of(plan: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Row(Listing, 2, id).to(DEVICE)
        with attach(model, plan):
            for _ in range(2):
                for unit in model.units:
                    unit.share(before)
                loss = model(rows()).sum()
                for unit in model.units:
                    unit.share(after)
                loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients_of(on(PAIR, kind)), gradients_of({})))


@each_kind
def test_changed_outputs_are_an_error_or_right(kind):
    """The first of the two is also the second's input."""
    x = rows()
    exact = pair()
    exact(x).sum().backward()
    for which in PAIR:
        model = pair()
        model.get_submodule(which).register_forward_hook(lambda module, args, out: CHANGED.append(out))
        with attach(model, on(PAIR, kind), transport=always(DeferredTransport())):
            loss = model(x).sum()
            CHANGED.pop().add_(1)
            try:
                loss.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                assert which == "units.1"
                assert_equal(gradients(model), gradients(exact))


CHANGED: list[Tensor] = []


@in_turn(FEW)
def test_changed_weight_is_an_error(case, kind):
    model, choices = planned(case, kind)
    with attach(model, choices, transport=always(DeferredTransport())):
        loss = step(case, model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Twice(Row):
    """One unit called several times, once skipped."""

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2, 0, 1, 1, 0):
            x = self.units[i](x)
        return x


@each_kind
def test_shared_and_skipped_units(kind):
    make = lambda: Twice(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)), 3)  # noqa: E731
    units = [f"units.{i}" for i in range(3)]
    assert_as_plain(make, on(units, kind), rows, transport=always(DeferredTransport()))


@in_turn(CASES.values())
def test_hooks_on_units_run_once(case, kind):
    model, choices = planned(case, kind)
    calls: list[str] = []
    unit = model.get_submodule(next(iter(choices)))
    unit.register_forward_pre_hook(lambda *_: calls.append("before"))
    unit.register_forward_hook(lambda *_: calls.append("after"))
    unit.register_full_backward_hook(lambda *_: calls.append("backward"))
    with attach(model, choices):
        step(case, model).backward()
    assert calls == ["before", "after", "backward"]


@in_turn(LANGUAGE, 1)
def test_lora_with_a_frozen_base(case, kind):
    peft = pytest.importorskip("peft")
    dtype = DTYPES[KINDS.index(kind) // len(LANGUAGE) % 2]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(case.make(), peft.LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear"))

    wanted, model = steps(case, make(), dtype), make()
    with attach(model, case.choices(model, parse_choice(kind))):
        assert_equal(steps(case, model, dtype), wanted)


@in_turn(DTYPES, 1)
def test_lora_on_experts_that_are_one_parameter_a_layer(kind, case):
    dtype, llama = case, CASES["llama"]
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).train().to(DEVICE)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))

    wanted, model = train(make(), llama, dtype, steps=4, **NO_CACHE), make()
    with attach(model, llama.choices(model, parse_choice(kind))):
        assert_equal(train(model, llama, dtype, steps=4, **NO_CACHE), wanted)


@in_turn(FEW)
def test_a_frozen_model_and_gradients_of_the_input_only(case, kind):
    def run(model: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(7)
        model.requires_grad_(False)
        if case.name in ("gpt2", "t5"):
            batch = case.batch()
            vectors = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_()
            loss = model(inputs_embeds=vectors, **NO_CACHE, **batch).loss
        else:
            vectors = case.batch().requires_grad_()
            loss = case.step(model, vectors)
        loss.backward()
        assert vectors.grad is not None
        return {"gradient": vectors.grad}

    model, choices = planned(case, kind)
    wanted = run(case.make())
    with attach(model, choices):
        assert_equal(run(model), wanted)
