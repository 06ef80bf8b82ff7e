"""A family of made-up models: steps shaped like real ones for any plan, whose every op, storage and copy is known.

Nothing here is measured. A unit is a list of ops that read, make and save tensors as a transformer's block, a plain
MLP's or a mixture's does; what a choice keeps, runs again or moves follows from that list. ``Unit scripts`` are played
into a Graph, which autockpt's own simulator then judges.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from autockpt.schema import Choice
from autockpt.schema.choices import ATTENTION, EVERYTHING

MIB = 2**20
HIDDEN = -1  # the key of what enters a unit
MM, FUSED, CHEAP = "aten.mm.default", "aten._scaled_dot_product_flash_attention.default", "aten.mul.Tensor"


@dataclass(frozen=True)
class Made:
    """One forward op. ``reads`` and ``needs`` (what its backward reads) are indices of ops, HIDDEN the unit's input.

    ``size`` of its output and ``weight`` of its gradient in bytes, times in seconds.
    """

    module: str
    target: str
    seconds: float
    back_seconds: float
    size: int
    reads: tuple[int, ...]
    needs: tuple[int, ...]
    weight: int = 0


@dataclass(frozen=True, eq=False)  # one object a kind: hashing all of it again and again would take long
class Kind:
    """One kind of unit: ``hidden`` bytes enter it; its ops in order, the last of which makes what it hands on."""

    name: str
    hidden: int
    ops: tuple[Made, ...]

    def size(self, key: int) -> int:
        return self.hidden if key == HIDDEN else self.ops[key].size

    @property
    def saved(self) -> frozenset[int]:
        """What backward reads."""
        return frozenset(need for op in self.ops for need in op.needs)

    @property
    def weights(self) -> int:
        return sum(op.weight for op in self.ops)


@dataclass(frozen=True)
class Line:
    """One op of a script: what is born with it, and what dies after it; keys are unique within the unit.

    Phase "view": a second forward stops short of the op, having taken a view of its weight.
    """

    op: int
    phase: str
    born: tuple[tuple[object, int, str], ...] = ()  # key, bytes, kind of storage
    died: tuple[object, ...] = ()


@dataclass(frozen=True)
class Script:
    """What a unit does under a choice. ``moved`` is what lies off the device from forward to backward, if anything."""

    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    held: tuple[int, ...]  # on the device, or moved, from the end of its forward to the begin of its backward
    moved: bool


OUTPUT = "output"  # key of what the unit hands on
INCOMING = "incoming"  # key of the gradient that enters its backward
OUTGOING = "outgoing"


@cache
def script(kind: Kind, choice: Choice) -> Script:
    """The script of a choice on a kind of unit."""
    saved = kind.saved
    held, rerun = _held(kind, choice)
    last = len(kind.ops) - 1
    readers = {k: max((j for j, op in enumerate(kind.ops) if k in op.reads), default=k) for k in range(last)}
    forward = []
    for j, op in enumerate(kind.ops):
        key: object = OUTPUT if j == last else j
        gone = tuple(k for k, reader in readers.items() if reader == j and k not in held)
        forward.append(Line(j, "forward", ((key, op.size, "activation"),), gone))
    backward = _reruns(kind, rerun, held, saved)
    present = (set(held) | set(rerun)) - {k for line in backward for k in line.died}
    for j in reversed(range(len(kind.ops))):
        op = kind.ops[j]
        made, size = (OUTGOING, kind.hidden) if j == 0 else (("gradient", j), sum(kind.size(k) for k in op.reads))
        born: list[tuple[object, int, str]] = [(made, size, "activation")]
        if op.weight:
            born.append((("weight", j), op.weight, "gradient"))
        needed = {k for other in kind.ops[:j] for k in other.needs}
        died: list[object] = [k for k in sorted(present) if k not in needed]
        present -= set(died)
        died += [("gradient", j + 1)] if j < last else []
        died += [INCOMING] if j == 0 else []
        backward.append(Line(j, "backward", tuple(born), tuple(died)))
    return Script(tuple(forward), tuple(backward), tuple(sorted(held)), "offload" in choice.kind)


def _held(kind: Kind, choice: Choice) -> tuple[frozenset[int], tuple[int, ...]]:
    """Outputs that outlive the forward, and the ops that run again, in order."""
    saved, name = kind.saved, choice.kind
    if name in ("save", "offload"):
        return saved, ()
    wanted: tuple[str, ...] = {"keep_attention": (ATTENTION,)}.get(name, getattr(choice, "keep", ()))
    kept = frozenset(
        j
        for j, op in enumerate(kind.ops)
        if (op.target == FUSED and ATTENTION in wanted)
        or (op.target == MM and op.module in wanted)
        or (op.target in (MM, FUSED) and EVERYTHING in wanted)
    )
    within: tuple[str, ...] = getattr(choice, "within", ())
    if within:
        inside = {j for j, op in enumerate(kind.ops) if op.module.split(".")[0] in within or op.module in within}
        users = {k: {j for j, op in enumerate(kind.ops) if k in op.needs} for k in saved}
        dropped = {k for k in saved if k in inside and k not in kept and users[k] <= inside}
        return frozenset(saved - dropped), tuple(sorted(dropped))
    rerun = tuple(j for j in range(max(saved) + 1) if j not in kept)
    return kept | {HIDDEN}, rerun


def _reruns(kind: Kind, rerun: tuple[int, ...], held: frozenset[int], saved: frozenset[int]) -> list[Line]:
    lines = []
    for j in rerun:
        later = [k for k in rerun if k > j]
        passing = [k for k in rerun if k <= j and k not in saved and not any(k in kind.ops[m].reads for m in later)]
        done = {k for line in lines for k in line.died}
        died = tuple(k for k in passing if k not in done)
        lines.append(Line(j, "recompute", ((j, kind.ops[j].size, "activation"),), died))
    return [*lines, Line(rerun[-1] + 1, "view")] if rerun else lines


def block(name: str, hidden: float, wide: float, speed: float, attention: float) -> Kind:
    """A transformer's block with a gated MLP: ``wide`` times its input inside, ``attention`` seconds for attention.

    ``hidden`` in bytes; ``speed``: seconds per matrix product of one hidden width by another.
    """
    h, f = int(hidden), int(hidden * wide)
    cheap = 0.03 * speed * hidden / (8 * MIB)
    w = int(2 * MIB)
    ops = (
        Made("input_layernorm", CHEAP, 2 * cheap, 4 * cheap, h, (HIDDEN,), (HIDDEN,)),
        Made("self_attn.qkv_proj", MM, 3 * speed, 6 * speed, 3 * h, (0,), (0,), 3 * w),
        Made("self_attn", FUSED, attention, 2.5 * attention, h, (1,), (1, 2)),
        Made("self_attn.o_proj", MM, speed, 2 * speed, h, (2,), (2,), w),
        Made("", CHEAP, cheap, cheap, h, (HIDDEN, 3), ()),
        Made("post_attention_layernorm", CHEAP, 2 * cheap, 4 * cheap, h, (4,), (4,)),
        Made("mlp.gate_proj", MM, wide * speed, 2 * wide * speed, f, (5,), (5,), int(w * wide)),
        Made("mlp.up_proj", MM, wide * speed, 2 * wide * speed, f, (5,), (5,), int(w * wide)),
        Made("mlp.act_fn", CHEAP, wide * cheap, 2 * wide * cheap, f, (6, 7), (6, 7)),
        Made("mlp.down_proj", MM, wide * speed, 2 * wide * speed, h, (8,), (8,), int(w * wide)),
        Made("", CHEAP, cheap, cheap, h, (4, 9), ()),
    )
    return Kind(name, h, ops)


def mlp(name: str, hidden: float, wide: float, speed: float) -> Kind:
    """A block without attention: norm, two matrix products with an activation function between, a residual."""
    h, f = int(hidden), int(hidden * wide)
    cheap = 0.03 * speed * hidden / (8 * MIB)
    w = int(2 * MIB * wide)
    ops = (
        Made("norm", CHEAP, 2 * cheap, 4 * cheap, h, (HIDDEN,), (HIDDEN,)),
        Made("mlp.fc1", MM, wide * speed, 2 * wide * speed, f, (0,), (0,), w),
        Made("mlp.act_fn", CHEAP, wide * cheap, 2 * wide * cheap, f, (1,), (1,)),
        Made("mlp.fc2", MM, wide * speed, 2 * wide * speed, h, (2,), (2,), w),
        Made("", CHEAP, cheap, cheap, h, (HIDDEN, 3), ()),
    )
    return Kind(name, h, ops)


@dataclass(frozen=True, eq=False)
class Instance:
    """A made-up model on a made-up device: ``kinds`` in order of execution; times in seconds, bandwidth in bytes/s.

    ``queues``: copies run beside compute, so that what offloading costs depends on the schedule; without them every
    cost adds up. ``share``: the budget, between the leanest plan (0) and saving everything (1).
    """

    name: str
    kinds: tuple[Kind, ...]
    queues: bool
    share: float
    bandwidth: float
    head_seconds: float
    head_bytes: int
    optimizer_seconds: float

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(f"layers.{i}" for i in range(len(self.kinds)))


Pattern = Callable[[list[Kind], int], list[Kind]]


def _alternating(kinds: list[Kind], n: int) -> list[Kind]:
    return [kinds[i % len(kinds)] for i in range(n)]


def _stages(kinds: list[Kind], n: int) -> list[Kind]:
    return [kinds[i * len(kinds) // n] for i in range(n)]


def instance(seed: int, units: int, kinds: int, *, queues: bool, share: float, stages: bool = False) -> Instance:
    """A member of the family: ``kinds`` different units, in turns or in stages; the rest is drawn from ``seed``."""
    rng = random.Random(1000 * seed + units)
    hidden = rng.uniform(6, 12) * MIB
    drawn = []
    for k in range(kinds):
        speed = rng.uniform(0.5, 1.5) * 1e-3 * 32 / units
        if k % 3 == 2:
            drawn.append(mlp(f"mlp{k}", hidden, rng.uniform(2, 5), speed))
        else:
            drawn.append(block(f"block{k}", hidden, rng.uniform(2, 4), speed, rng.uniform(0.3, 3) * speed))
    order = (_stages if stages else _alternating)(drawn, units)
    compute = sum(op.seconds + op.back_seconds for kind in order for op in kind.ops)
    saved = sum(kind.size(k) for kind in order for k in kind.saved)
    forward = sum(op.seconds for kind in order for op in kind.ops)
    # With queues a copy takes 0.7 to 2 times as long as the forward that it can hide behind; inline, moving a unit's
    # activations both ways takes half to twice as long as running it again.
    slower = rng.uniform(0.7, 2.0) if queues else rng.uniform(0.5, 2.0) / 2
    bandwidth = saved / forward / slower
    return Instance(
        name=f"{'queues' if queues else 'adds up'}, {units} units of {kinds} kinds{', in stages' if stages else ''}",
        kinds=tuple(order),
        queues=queues,
        share=share,
        bandwidth=bandwidth,
        head_seconds=0.02 * compute,
        head_bytes=int(rng.uniform(1, 4) * hidden),
        optimizer_seconds=0.03 * compute,
    )
