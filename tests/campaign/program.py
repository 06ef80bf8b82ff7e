"""One program: a model and a training step as text, drawn by a number."""

import random
import textwrap
from dataclasses import dataclass

from tests.campaign.loops import CARRIES, CARRY, LOOP, LOOPS, LOSSES
from tests.campaign.pieces import ALL, BY_NAME, Piece

PLACES = ("block", "mlp", "attn", "hook", "helper")
"""Where a piece runs: in the forward of a block or of its MLP or attention, in a hook, in a function of the block."""


@dataclass(frozen=True)
class Placed:
    """A piece in a program; ``late``: the step with which it begins."""

    name: str
    place: str = "block"
    late: int = 0

    @property
    def piece(self) -> Piece:
        return BY_NAME[self.name]


@dataclass(frozen=True)
class Program:
    """What to put together; ``source`` is the text. ``loss`` is one of a language model's, or empty."""

    pieces: tuple[Placed, ...] = ()
    loop: str = "once"
    carry: str = "tensor"
    layers: int = 2
    steps: int = 3
    flat: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    keyword: bool = False
    loss: str = ""
    calls: str = "in turn"

    @property
    def ordinary(self) -> bool:
        """Whether every part of it is usual, so that a refusal is a fault."""
        parts = [LOOP[self.loop].ordinary, CARRY[self.carry].ordinary, *(p.piece.ordinary for p in self.pieces)]
        return all(parts) and not self.loss and self.calls != "twice"

    @property
    def families(self) -> list[str]:
        """What it has of the table's rows."""
        found = [f"{p.piece.group}: {p.name}{', late' if p.late else ''}" for p in self.pieces]
        found += [f"loop: {self.loop}"] if self.loop != "once" else []
        found += [f"carry: {self.carry}"] if self.carry != "tensor" else []
        found += [f"head: {self.loss}"] if self.loss else []
        found += [f"calls: {self.calls}"] if self.calls != "in turn" else []
        found += [f"dtype: {self.dtype}"] if self.dtype != "float32" else []
        return found or ["plain"]


_TWICE = ("gradient penalty", "forward-mode AD", "is_grads_batched")
"""Loops that differentiate twice, which fused attention and SiLU do not allow."""
_CALLS = {"in turn": 12, "one skipped at random": 1, "one skipped by step": 1, "twice": 1, "last one first": 1}


def draw(number: int) -> Program:
    """The program of a number."""
    rng = random.Random(f"program {number}")
    lm = rng.random() < 0.12
    alone = rng.random() < 0.12
    count = 0 if alone else rng.choices((1, 2, 3), (6, 2, 1))[0]
    chosen = [rng.choice(ALL) for _ in range(count)]
    if count == 1 and rng.random() < 0.2:  # one piece on two hosts
        chosen *= 2
    placed = []
    for piece in chosen:
        place = rng.choices(PLACES, (4, 2, 2, 1, 1))[0]
        if piece.block_only or piece.argument:
            place = rng.choice(("block", "helper"))
        late = rng.choice((1, 2, 5)) if piece.use and rng.random() < 0.15 else 0
        placed.append(Placed(piece.name, place, late))
    loop = rng.choice(LOOPS).name if alone or rng.random() < 0.25 else "once"
    carry = rng.choice(CARRIES).name if rng.random() < (0.3 if alone else 0.1) else "tensor"
    latest = max((p.late for p in placed), default=0)
    return Program(
        pieces=tuple(placed),
        loop=loop,
        carry=carry,
        layers=rng.choice((2, 2, 3)),
        steps=latest + 2 if latest else 3,
        flat=rng.random() < 0.25,
        dropout=rng.choice((0.0, 0.0, 0.1)),
        dtype=rng.choices(("float32", "bfloat16", "float64"), (10, 1, 1))[0],
        keyword=rng.random() < 0.2,
        loss=rng.choice(list(LOSSES)) if lm else "",
        calls=rng.choices(list(_CALLS), list(_CALLS.values()))[0],
    )


_HEAD = """\
import array, collections, concurrent.futures, contextvars, copy, dataclasses, enum, fractions, functools, io
import itertools, os, queue, random, threading, types, weakref
import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

D, T, V = 32, 32, 48
STEP, STEPS = 0, {steps}
LM, CARRIED = {lm}, {carried}
KEPT = []
"""


def source(program: Program) -> str:
    """The program's text: ``build()``, ``batch(step)`` and ``train(model, x)``, which leaves gradients in ``.grad``."""
    carry = CARRY[program.carry]
    tops, model_setup, model_before, between_layers, arguments = [carry.top], [], [], [], []
    between, after = [], []
    setup: dict[str, list[str]] = {"Block": [], "Mlp": [], "Attn": []}
    use: dict[str, list[str]] = {"Block": [], "Mlp": [], "Attn": []}
    methods: list[str] = []
    for n, placed in enumerate(program.pieces):
        piece, late = placed.piece, placed.late

        def text(words: str, n: int = n) -> str:
            return words.replace("_N", f"_{n}")

        def gated(words: str, late: int = late) -> str:
            return f"if STEP >= {late}:\n{textwrap.indent(words, '    ')}" if words and late else words

        place = placed.place
        if program.flat and place in ("mlp", "attn"):
            place = "block"
        if piece.argument:
            arguments.append(text(piece.argument))
        host = {"mlp": "Mlp", "attn": "Attn"}.get(place, "Block")
        setup[host].append(text(piece.setup))
        body = text(gated(piece.use))
        if piece.use and place == "hook":
            tops.append(
                f"def hook_{n}(self, module, args):\n    (x,) = args\n{textwrap.indent(body, '    ')}\n    return (x,)"
            )
            inner = "self.a" if program.flat else "self.mlp.up"
            setup[host].append(f"{inner}.register_forward_pre_hook(functools.partial(hook_{n}, self))")
        elif piece.use and place == "helper":
            names = "".join(f", {a}" for a in [text(piece.argument)] if a)
            methods.append(f"def helper_{n}(self, x{names}):\n{textwrap.indent(body, '    ')}\n    return x")
            use[host].append(f"x = self.helper_{n}(x{names})")
        else:
            use[host].append(body)
        tops.append(text(piece.top))
        model_setup.append(text(piece.model_setup))
        model_before.append(text(gated(piece.model_before) if not piece.argument else piece.model_before))
        between_layers.append(text(gated(piece.between_layers)))
        between.append(text(piece.between))
        after.append(text(piece.after))
    parts = [_HEAD.format(steps=program.steps, lm=bool(program.loss), carried=program.carry != "tensor"), *tops]
    if not program.flat:
        parts += [
            _attention(setup["Attn"], use["Attn"], fused=program.loop not in _TWICE),
            _mlp(setup["Mlp"], use["Mlp"], program.dropout, "torch.tanh" if program.loop in _TWICE else "F.silu"),
        ]
    parts.append(_block(program, setup["Block"], use["Block"], methods, arguments))
    parts.append(_model(program, model_setup, model_before, between_layers, arguments))
    parts.append(_training(program, between, after))
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def _lines(indent: int, *texts: str) -> str:
    return "\n".join(textwrap.indent(text, " " * indent) for text in texts if text.strip())


def _class(name: str, setup: list[str], forward: str, body: list[str], methods: list[str] = []) -> str:  # noqa: B006
    return "\n".join(
        (
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            _lines(8, "super().__init__()", *setup),
            *(_lines(4, method) for method in methods),
            f"    def forward({forward}):",
            _lines(8, *body),
        )
    )


def _attention(setup: list[str], use: list[str], *, fused: bool) -> str:
    split = "q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))"
    attend = (
        "h = F.scaled_dot_product_attention(q, k, v, is_causal=True)" if fused else "h = (q @ k.mT / 4).softmax(-1) @ v"
    )
    layers = "self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)"
    return _class(
        "Attn", [layers, *setup], "self, x", [*use, split, attend, "return self.out(h.transpose(1, 2).flatten(-2))"]
    )


def _mlp(setup: list[str], use: list[str], dropout: float, act: str) -> str:
    layers = "self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)"
    drop = [f"self.drop = nn.Dropout({dropout})"] if dropout else []
    last = f"return self.drop(self.down({act}(self.up(x))))" if dropout else f"return self.down({act}(self.up(x)))"
    return _class("Mlp", [layers, *drop, *setup], "self, x", [*use, last])


def _block(program: Program, setup: list[str], use: list[str], methods: list[str], arguments: list[str]) -> str:
    carry = CARRY[program.carry]
    if program.flat:
        layers = ["self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)"]
        body = ["x = x + self.b(torch.tanh(self.a(x)))"]
        if program.dropout:
            body.append(f"x = F.dropout(x, {program.dropout}, self.training)")
    else:
        layers = ["self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)", "self.attn, self.mlp = Attn(), Mlp()"]
        body = ["x = x + self.attn(self.norm1(x))", "x = x + self.mlp(self.norm2(x))"]
    half = len(use) // 2
    steps = [carry.take, *use[:half], *body, *use[half:], f"return {carry.give}"]
    if len(use) == 1:
        steps = [carry.take, *use, *body, f"return {carry.give}"]
    forward = ", ".join(["self", "x", *arguments])
    return _class("Block", [*layers, *setup], forward, steps, methods)


def _model(program: Program, setup: list[str], before: list[str], between: list[str], arguments: list[str]) -> str:
    carry = CARRY[program.carry]
    given = "".join(f", {a}={a}" if program.keyword else f", {a}" for a in arguments)
    x = "x=x" if program.keyword else "x"
    call = f"x = layer({x}{given})"
    body = _lines(4, call, *between) if not carry.unwrap else _lines(4, call)
    loops = {
        "in turn": f"for layer in self.layers:\n{body}",
        "one skipped at random": f"for layer in self.layers:\n    if random.random() < 0.3:\n        continue\n{body}",
        "one skipped by step": f"for i, layer in enumerate(self.layers):\n    if i == STEP:\n        continue\n{body}",
        "twice": f"for layer in [*self.layers, *self.layers]:\n{body}",
        "last one first": f"for layer in reversed(self.layers):\n{body}",
    }
    layers = ["self.inp = nn.Linear(D, D)", f"self.layers = nn.ModuleList(Block() for _ in range({program.layers}))"]
    if program.loss:
        layers.append("self.lm_head = nn.Linear(D, V)")
    last = "return self.lm_head(x)" if program.loss else "return x"
    methods = ["def get_output_embeddings(self): return self.lm_head"] if program.loss else []
    steps = ["x = self.inp(x)", *before, carry.wrap, loops[program.calls], carry.unwrap, last]
    return _class("Model", [*layers, *setup], "self, x", steps, methods)


def _training(program: Program, between: list[str], after: list[str]) -> str:
    dtype = f"torch.{program.dtype}"
    objective = LOSSES[program.loss] if program.loss else "return out.float().pow(2).mean()"
    extra = [
        "for layer in model.modules():\n    if getattr(layer, 'aux', None) is not None:\n"
        "        loss = loss + layer.aux.float()",
        "for aux in getattr(model, 'losses', ()):\n    loss = loss + aux.float() * 0.1",
    ]
    uses = any(p.piece.model_setup.startswith("self.uses_") for p in program.pieces)
    labels = "def labels_of(out):\n    return (torch.arange(out.shape[:-1].numel()) * 7) % V"
    loss = f"def loss_of(out):\n{_lines(4, objective)}"
    objective = (
        "def objective(model, out):\n    loss = loss_of(out)\n"
        + (_lines(4, *extra) + "\n" if uses else "")
        + "    return loss"
    )
    body = []
    for line in LOOP[program.loop].text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        inserted = {"BETWEEN": between, "AFTER": after}.get(line.strip())
        body += [textwrap.indent(t, indent) for t in inserted if t] if inserted is not None else [line]
    return "\n\n".join(
        (
            *([labels] if program.loss else []),
            loss,
            objective,
            f"def build():\n    return Model().to({dtype})",
            "def batch(step):\n    return torch.randn(4, T, D, generator=torch.Generator().manual_seed(step))"
            f".to({dtype})",
            "def train(model, x):\n" + _lines(4, *body),
        )
    )
