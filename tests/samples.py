"""Outcomes, graphs and trials to draw."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    Comparison,
    DeviceInfo,
    Environment,
    Graph,
    Measurement,
    Op,
    Phase,
    Plan,
    Prediction,
    ResolvedBudget,
    SearchOutcome,
    Storage,
    Trial,
    Unit,
    Verdict,
    covers,
    plan_hash,
)
from autockpt.schema.graph import TensorMeta, Work

MIB = 2**20
BLOCKS = [f"model.layers.{i}" for i in range(12)]
UNITS = tuple(Unit(name=n, cls="LlamaDecoderLayer", kind=0) for n in BLOCKS)

MATMUL = "aten.mm.default(float32[4,4], float32[4,4])"


def console(width: int = 80) -> tuple[Console, io.BytesIO]:
    """A console that is no terminal, and the bytes that it wrote."""
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    return Console(file=text, width=width, highlight=False, markup=False, emoji=False), raw


def printed(show: Callable[..., None], *what: Any, width: int = 80) -> str:
    """What ``show`` prints of it on a console."""
    screen, raw = console(width)
    show(*what, screen)
    return raw.getvalue().decode()


def environment(kind: str = "cpu", capacity_bytes: int = 1 << 40, **device: Any) -> Environment:
    """That of a made-up device."""
    data = {"kind": kind, "name": "made up", "capacity_bytes": capacity_bytes} | device
    return Environment(device=DeviceInfo.model_validate(data), versions={})


def choices() -> dict[str, Choice]:
    return {name: SAVE if i < 4 else OFFLOAD if i == 4 else RECOMPUTE for i, name in enumerate(BLOCKS)}


def row(name: str, verdict: Verdict, peak: float, seconds: float, measured: tuple[float, float] | None) -> Comparison:
    """Peaks in MiB."""
    reading = None
    if measured is not None:
        reading = Measurement(peak_bytes=int(measured[0] * MIB), step_seconds=measured[1], noise=0.008, steps=10)
    predicted = Prediction(peak_bytes=int(peak * MIB), step_seconds=seconds)
    return Comparison(name=name, verdict=verdict, predicted=predicted, measured=reading)


def outcome(*, none_fits: bool = True, simulated: bool = False, **changes: object) -> SearchOutcome:
    rows = (
        row("none", "over_budget" if none_fits else "out_of_memory", 612, 0.409, (611.8, 0.412) if none_fits else None),
        row("recompute all", "fits", 301, 0.520, (301.2, 0.531)),
        row("every-2", "fits", 431, 0.465, (431.3, 0.471)),
        row("offload all", "fits", 320, 0.622, (321.0, 0.640)),
        row("ours", "fits", 441, 0.451, (440.7, 0.448)),
    )
    if simulated:
        rows = tuple(r.model_copy(update={"measured": None}) for r in rows)
    budget = ResolvedBudget(asked="60%act", bytes=450 * MIB, covers=covers("cpu"))
    plan = Plan.create(
        choices(),
        UNITS,
        model="llama-tiny",
        source="simulated" if simulated else "measured",
        predicted=rows[-1].predicted,
        measured=rows[-1].measured,
        budget=budget,
        baselines=rows[:-1],
    )
    data: dict[str, object] = {
        "plan": plan,
        "budget": budget,
        "device": DeviceInfo(kind="cpu", name="a processor (2 threads)", capacity_bytes=2**34),
        "rows": rows,
        "settings": {"dtype": "fp32", "batch_size": 4, "seq_len": 256, "packed": False},
        "source": "simulated" if simulated else "measured",
        "measured_trials": 31,
        "stopped": "nothing left can beat the best by more than the noise",
        "run_directory": Path("results/llama-tiny_cpu_60pct-act_1a2b3c4d"),
        "plan_path": Path("results/llama-tiny_cpu_60pct-act_1a2b3c4d/plan.yaml"),
        "seconds": 93.2,
        "notes": ("A note.",),
    }
    return SearchOutcome.model_validate(data | changes)


def trial(number: int, **changes: object) -> Trial:
    data: dict[str, object] = {
        "number": number,
        "name": "margin 0.02",
        "encoding": "knobs",
        "choices": choices(),
        "plan_hash": plan_hash(choices()),
        "state": "measured",
        "feasible": True,
        "predicted": Prediction(peak_bytes=441 * MIB, step_seconds=0.451),
        "measured": Measurement(peak_bytes=int(440.7 * MIB), step_seconds=0.448, noise=0.008),
    }
    return Trial.model_validate(data | changes)


def small_graph() -> Graph:
    """Two equal blocks with an MLP each, an embedding, a mask both blocks read, a loss, an optimizer step.

    Each block keeps 100 (attention) + 40 (MLP) bytes; its output of 10 bytes is the next one's input.
    """
    ops, storages = list[Op](), list[Storage]()
    units = tuple(
        u
        for i in range(2)
        for u in (
            Unit(name=f"h.{i}", cls="Block", kind=0),
            Unit(name=f"h.{i}.mlp", cls="MLP", kind=1, role="mlp", parent=f"h.{i}"),
        )
    )

    def op(module: str, phase: Phase, size: int, until: int, *reads: int, flops: int = 0, **more: Any) -> int:
        """Append an op; returns the id of the storage it makes. ``until`` is the last op that needs it."""
        index, made = len(ops), len(storages)
        block = module[:3] if module.startswith("h.") else None
        storages.append(Storage(id=made, bytes=size, birth=index, death=until, unit=block, **more))
        out = TensorMeta(shape=(size,), stride=(1,), dtype="uint8", storage=made)
        data = {"index": index, "target": "aten.mm.default", "phase": phase, "module": module, "unit": block}
        ops.append(Op(**data, signature=0, flops=flops, inputs=reads, outputs=(out,)))
        return made

    last = 12
    x = op("embed", "forward", 10, last)
    mask = op("", "forward", 7, last)
    for i in range(2):
        inner = op(f"h.{i}.attn", "forward", 100, last - i, x, mask, flops=30)
        op(f"h.{i}.attn", "forward", 500, len(ops), inner)
        hidden = op(f"h.{i}.mlp.up", "forward", 40, last - i, inner, flops=20)
        x = op(f"h.{i}", "forward", 10, last, hidden)
    op("head", "forward", 5, 11, x, flops=10)
    op("h.1.attn", "backward", 900, 11, flops=60, kind="gradient")
    op("h.0.attn", "recompute", 3, 12, flops=60)
    op("", "optimizer", 50, 13, kind="optimizer")
    return Graph(
        resident_bytes=1000,
        signatures=(MATMUL,),
        work=(Work("matrix", "mm"),),
        ops=tuple(ops),
        storages=tuple(storages),
        units=units,
        notes=("experts are assumed balanced",),
    )
