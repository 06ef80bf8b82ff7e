"""One pair of program and plan against plain training."""

import contextvars
import functools
import random
import warnings
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autockpt.errors import AutockptError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, parse_choice
from autockpt.schema.graph import Unit
from autockpt.workload.units import discover_head, discover_units
from tests.campaign.observed import loaded, run
from tests.campaign.program import Program, draw, source
from tests.evidence.sweep.plans import random_plan

PLANS = 8
"""Pairs of one program: number // PLANS is the program, number % PLANS the plan."""
UNIFORM: tuple[Any, ...] = (
    *("recompute", "selective", "keep_attention", "remake", "offload", "recompute_offload"),
    {"kind": "segment", "size": 2},
    {"kind": "segment", "size": 3},
    {"kind": "remake", "keep": ["**"]},
)
_SPLIT = (
    {"kind": "selective", "keep": ["mlp.up"]},
    {"kind": "selective", "keep": [], "within": ["mlp"]},
    {"kind": "remake", "within": ["attn"]},
)
_HEADS = ("chunked_softmax", {"kind": "chunked_softmax", "chunks": 2}, "chunked_softmax", "chunked_loss")
_FP32 = b"torch.float32("
_CLOSE, _CLOSE_IN_BF16 = 1e-3, 3e-2
"""How far a gradient may be from plain training's, by its length, where a choice is not exact."""


@dataclass
class Seen:
    """What a program leaves behind in the order in which it comes; ``error`` where it ended early."""

    entries: list[tuple[str, bytes]] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(frozen=True)
class Verdict:
    """How a pair ended.

    ``word``: equal, refused, WRONG, foreign; for programs that cannot serve invalid or unsteady; from outside of the
    process CRASH and HANG. ``choice`` is the plan in a word, ``detail`` the first difference or the error, ``text`` a
    checksum of program and plan.
    """

    number: int
    word: str
    families: list[str]
    choice: str
    ordinary: bool
    detail: str = ""
    text: int = 0


def plan(program: Program, number: int) -> tuple[str, dict[str, Choice]]:
    """A plan for the program by its number: its kind in a word, and a choice for each unit."""
    rng = random.Random(f"plan {number}")
    model, units, head = _built(program)
    blocks = [u.name for u in units if u.role == "block"]
    uniform = random.Random(f"plans {number // PLANS}").sample(UNIFORM, 5)
    which = number % PLANS
    if which < len(uniform):
        choice = parse_choice(uniform[which])
        word, choices = str(choice), dict.fromkeys(blocks, choice)
    elif which == len(uniform) and not program.flat:
        choice = parse_choice(rng.choice(_SPLIT))
        word, choices = str(choice), dict.fromkeys(blocks, choice)
    else:
        word, choices = "mixture", random_plan(model, units, number)
    if head is not None and (which % 2 == 0 or rng.random() < 0.5):
        chosen = parse_choice(rng.choice(_HEADS))
        word = f"{chosen.kind} with others"
        if rng.random() < 0.6:
            word, choices = str(chosen.kind), {}
        choices[head.name] = chosen
    return word, choices


@functools.lru_cache(maxsize=2)
def _built(program: Program) -> tuple[nn.Module, tuple[Unit, ...], Unit | None]:
    model = loaded(source(program))["build"]()
    return model, discover_units(model), discover_head(model) if program.loss else None


def observe(text: str, choices: dict[str, Choice] | None) -> Seen:
    """Run a program, in a context of its own."""
    seen = Seen()
    attached = partial(attach, choices=choices) if choices is not None else None

    def inside() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(text, attached, seen.entries)

    try:
        contextvars.copy_context().run(inside)
    except Exception as error:
        seen.error = error.with_traceback(None)
        seen.error.__context__ = None
    torch.set_default_dtype(torch.float32)
    return seen


class Trials:
    """Trials by number; plain training of a program is run once for all of its pairs."""

    def __init__(self) -> None:
        self._number = -1
        self._plain: tuple[Seen, str] | None = None

    def run(self, number: int, program: Program | None = None, choices: dict[str, Choice] | None = None) -> Verdict:
        """The pair of a number; ``program`` and ``choices`` replace what would be drawn."""
        drawn = program or draw(number // PLANS)
        text = source(drawn)
        plain, why = self._plainly(number // PLANS if program is None else -1, text)
        verdict = partial(Verdict, number, families=drawn.families, ordinary=drawn.ordinary)
        if why:
            return verdict(word=why, choice="", detail=_said(plain.error) if plain.error else "")
        word = "given"
        if choices is None:
            word, choices = plan(drawn, number)
        seen = observe(text, choices)
        verdict = partial(verdict, text=zlib.crc32(f"{text}{choices}".encode()))
        away = _CLOSE_IN_BF16 if "bfloat16" in text else _CLOSE
        away = 0.0 if all(choice.exact for choice in choices.values()) else away
        different = difference(plain.entries, seen.entries, away=away, whole=seen.error is None)
        ended, detail = ("equal", "")
        if seen.error is not None:
            ended = "refused" if isinstance(seen.error, AutockptError) else "foreign"
            detail = _said(seen.error)
        if different:
            ended, detail = "WRONG", f"{different}{f', then {ended}: {detail}' if detail else ''}"
        return verdict(word=ended, choice=word, detail=detail)

    def _plainly(self, program: int, text: str) -> tuple[Seen, str]:
        if self._plain is None or program < 0 or program != self._number:
            first = observe(text, None)
            why = "invalid" if first.error is not None else ""
            if not why and observe(text, None).entries != first.entries:
                why = "unsteady"
            self._plain, self._number = (first, why), program
        return self._plain


def difference(plain: list[tuple[str, bytes]], other: list[tuple[str, bytes]], *, whole: bool, away: float = 0) -> str:
    """The first entry that differs, by name; empty where there is none.

    ``whole``: the other must have all entries. ``away``: fp32 tensors may differ by this part of their length, and by
    what rounding makes of a gradient that is zero but for it: that of a bias in front of a batch norm.
    """
    lengths = [_vector(data).norm() for name, data in plain if away and "gradient" in name and data.startswith(_FP32)]
    rounding = float(max(lengths, default=0.0)) * torch.finfo(torch.float32).eps
    for (name, before), (other_name, now) in zip(plain, other, strict=False):
        if name != other_name:
            return f"{name} is missing"
        if before != now and (not away or not _close(before, now, away, rounding)):
            return name
    if whole and len(plain) != len(other):
        return f"{len(plain)} entries became {len(other)}"
    return ""


def _close(before: bytes, now: bytes, away: float, rounding: float) -> bool:
    """Whether two fp32 tensors are equal up to rounding; other entries are not compared then."""
    if not before.startswith(_FP32):
        return True
    if len(before) != len(now):
        return False
    a, b = _vector(before), _vector(now)
    return bool((a - b).norm() <= away * a.norm() + rounding)


def _vector(data: bytes) -> torch.Tensor:
    """The numbers of an fp32 tensor, as ``observe`` keeps it: its type and shape, then its bytes."""
    return torch.frombuffer(bytearray(data[data.index(b")") + 1 :]) or bytearray(4), dtype=torch.float32)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}" if str(error) else type(error).__name__
