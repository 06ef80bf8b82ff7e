"""Tiny models of different build, and what a training run on them leaves behind."""

import copy
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.runtime import attach
from autockpt.schema.choices import Choice, choice_kinds, parse_choice
from autockpt.workload.units import discover_units
from tests.device import DEVICE, ON_ACCELERATOR, here, random_state, random_state_kept

KINDS = sorted(choice_kinds("block"))
Step = Callable[[nn.Module, Any], Tensor]


class Tally(logging.Filter):
    """Counts what runs, recomputations too. A logger's state is none of the model's, and not restored after them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Any] = []


class Unit(nn.Module):
    """A unit whose forward is ``body(self, ...)``; ``calls`` counts how often it ran."""

    def __init__(self, body: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.linear, self.body, self.counter = nn.Linear(width, width), body, Tally()

    @property
    def calls(self) -> int:
        return self.counter.calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.counter.calls += 1
        return self.body(self, *args, **kwargs)


def nothing(_: Tensor) -> None:
    """A function of Python's, which every compiler traces."""


class Row(nn.Module):
    """Units in a row; ``between`` is called with the output of each."""

    def __init__(self, make: Callable[[], nn.Module], n: int = 2, between: Callable[[Tensor], Any] = nothing) -> None:
        super().__init__()
        self.units, self.between = nn.ModuleList(make() for _ in range(n)), between

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        for unit in self.units:
            x = unit(x, *more)
            self.between(x)
        return x


class Ops(TorchDispatchMode):
    """Counts the ops that run in ``forward`` and in ``backward``."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.forward if torch._C._current_graph_task_id() == -1 else self.backward)[str(func)] += 1
        return func(*args, **(kwargs or {}))


def number(ops: Counter[str], part: str) -> int:
    """How many of them have this in their name, and are no op of a derivative."""
    return sum(n for name, n in ops.items() if part in name and "backward" not in name)


@dataclass(frozen=True)
class Case:
    """``make()`` builds the model with fixed weights; ``step(model, batch, **extra)`` gives a loss."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    step: Callable[..., Tensor]
    takes_cache: bool = False

    def __str__(self) -> str:
        return self.name

    def units(self, model: nn.Module) -> list[str]:
        return [u.name for u in discover_units(model) if u.role == "block"]

    def choices(self, model: nn.Module, choice: Choice) -> dict[str, Choice]:
        return dict.fromkeys(self.units(model), choice)


def language_step(model: nn.Module, batch: dict[str, Tensor], **extra: Any) -> Tensor:
    return model(**batch, **extra).loss


def feature_step(model: nn.Module, batch: Tensor, **extra: Any) -> Tensor:
    return model(batch, **extra).float().pow(2).mean()


class ConvBlock(nn.Module):
    """A residual block as ResNet has them: in-place activations, BatchNorm, dropout."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels, momentum=None)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.first(x)))
        out = self.drop(self.norm2(self.second(out)))
        out += x
        return self.act(out)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    @cache
    def built() -> nn.Module:
        with random_state_kept():
            torch.manual_seed(0)
            return make().train().to(DEVICE)

    return lambda: copy.deepcopy(built())  # which takes a fifth of the time


def _on_device(batch: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: here(batch())


def _tokens(length: int = 48, rows: int = 4, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 64, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -5:] = 0
    return batch


def _pixels() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": torch.arange(4) % 3}


def _features(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(3))


SIZES: dict[str, int] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, attention_dropout=0.1, **SIZES)
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **SIZES))


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=32, patch_size=4, hidden_dropout_prob=0.1, num_labels=3, **SIZES)
    return transformers.ViTForImageClassification(config)


def _sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))


CASES = {
    case.name: case
    for case in (
        Case("llama", _seeded(_llama), _on_device(_tokens), language_step, takes_cache=True),
        Case("gpt2", _seeded(_gpt2), _on_device(_tokens), language_step, takes_cache=True),
        Case("bert", _seeded(_bert), _on_device(_tokens), language_step),
        Case("t5", _seeded(_t5), _on_device(_tokens), language_step, takes_cache=True),
        Case("vit", _seeded(_vit), _on_device(_pixels), language_step),
        Case("cnn", _seeded(Cnn), _on_device(_features(4, 3, 16, 16)), feature_step),
        Case("sequential", _seeded(_sequential), _on_device(_features(128, 64)), feature_step),
    )
}


def in_turn(cases: Iterable[Any], number: int = 2) -> pytest.MarkDecorator:
    """Each kind with so many of the cases, and each case with kinds of all sorts: the rest would say the same."""
    cases = [*cases]
    pairs = [(kind, cases[(i * number + j) % len(cases)]) for i, kind in enumerate(KINDS) for j in range(number)]
    return pytest.mark.parametrize(("kind", "case"), pairs, ids=str)


@contextmanager
def precision(name: str) -> Iterator[None]:
    """``fp32``, or ``bf16``: autocast."""
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16) if name == "bf16" else nullcontext():
        yield


def train(model: nn.Module, case: Case, dtype: str = "fp32", steps: int = 2, **extra: Any) -> dict[str, Tensor]:
    """Everything that ``steps`` training steps compute or change, for comparison bit by bit."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = case.batch()
    seen: dict[str, Tensor] = {}
    for i in range(steps):
        with precision(dtype):
            loss = case.step(model, batch, **extra)
        seen[f"{i} loss"] = loss.detach().clone()
        seen[f"{i} random state after forward"] = random_state()
        loss.backward()
        seen[f"{i} random state after backward"] = random_state()
        seen |= {f"{i} gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        seen |= {f"{i} buffer {n}": b.clone() for n, b in model.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Bit-equal in every entry."""
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, different


def plain(case: Case, dtype: str = "fp32", steps: int = 2) -> dict[str, Tensor]:
    """The same training without any plan; language models without their KV cache."""
    return train(case.make(), case, dtype, steps, **({"use_cache": False} if case.takes_cache else {}))


def on(units: Iterable[str], kind: Any) -> dict[str, Choice]:
    """The same choice on each of them; None: nothing."""
    return {} if kind is None else dict.fromkeys(units, parse_choice(kind))


def _nothing(model: Any, step: int) -> None:
    pass


def trained(
    make: Callable[[], nn.Module],
    plan: Mapping[str, Choice],
    batch: Callable[[], Tensor],
    steps: int = 4,
    *,
    before: Callable[[Any, int], Any] = _nothing,
    between: Callable[[Any, int], Any] = _nothing,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    together: bool = False,
    **session: Any,
) -> dict[str, Tensor]:
    """What some steps leave of a model that is made for them, by always the same random numbers.

    ``before`` each forward and ``between`` each forward and its backward something is done to the model. ``around`` the
    forward is a context, ``backward`` is that of the loss. ``together``: all forwards come before their backwards.
    ``session``: options of attach.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, seen, waiting = make().to(DEVICE), dict[str, Tensor](), list[tuple[Tensor, Tensor]]()
    with attach(model, plan, **session):
        for step in range(steps):
            before(model, step)
            x = here(batch()).requires_grad_()
            with around():
                loss = model(x).float().square().mean()
            waiting.append((x, loss))
            if together and step < steps - 1:
                continue
            between(model, step)
            for number, (x, loss) in enumerate(waiting, step + 1 - len(waiting)):
                backward(loss)
                seen[f"{number} loss"] = loss.detach()
                seen |= {f"{number} input": x.grad} if x.grad is not None else {}
            seen |= {f"{step} {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
            seen |= {f"{step} buffer {n}": b.clone() for n, b in model.named_buffers()}
            seen[f"{step} random"] = torch.cat([random_state(), torch.tensor([random.random(), np.random.rand()])])
            model.zero_grad()
            waiting.clear()
    return seen


def assert_as_plain(
    make: Callable[[], nn.Module], plan: Mapping[str, Choice], batch: Callable[[], Tensor], *how: Any, **more: Any
) -> None:
    """Training leaves the same under the plan as without one; the arguments are those of ``trained``."""
    plainly = {name: value for name, value in more.items() if name not in ("sentinels", "transport")}
    wanted = trained(make, {}, batch, *how, **plainly)
    assert_equal(trained(make, plan, batch, *how, **more), wanted)


def bytes_alive_after(forward: Callable[[], Any]) -> int:
    """Bytes that the allocator still holds of what ``forward`` allocated, while its result is alive."""
    gc.collect()  # or what an earlier test left behind might be freed in between and counted
    gc.freeze()
    if ON_ACCELERATOR:
        before = torch.accelerator.memory_allocated(DEVICE)
        result = forward()
        kept = torch.accelerator.memory_allocated(DEVICE) - before
        del result
        return kept
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = forward()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    del result
    return sum(e.nbytes() for e in events if e.name() == "[memory]")


def objects_alive_after(forward: Callable[[], Any]) -> int:
    """How many objects Python's garbage collector has to look through for what ``forward`` leaves until backward."""
    for _ in range(4):  # what checked calls (1, 2, 4) learn stays
        forward().backward()
    gc.collect()
    gc.disable()
    before = len(gc.get_objects())
    result = forward()
    alive = len(gc.get_objects()) - before
    gc.enable()
    result.backward()
    return alive
