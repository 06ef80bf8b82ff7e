from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.analysis.holdings import resampled
from autockpt.analysis.sentences import largest_words
from autockpt.cli.explain_table import draw, print_explanation, print_ops
from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, Choice, ResolvedBudget
from autockpt.schema.explanation import (
    Alive,
    Bargain,
    BudgetStep,
    Curve,
    Explanation,
    Front,
    Holding,
    Largest,
    Moment,
    Reach,
    Slice,
    Span,
    Why,
)
from tests.samples import console, small_graph

MIB = 2**20
NAMES = [f"model.layers.{i}" for i in range(32)]
CHOICES: dict[str, Choice] = {n: RECOMPUTE if i < 20 else SAVE for i, n in enumerate(NAMES)}


def reach(peak: int, seconds: float, recomputed: int) -> Reach:
    choices: dict[str, Choice] = {n: RECOMPUTE if i < recomputed else SAVE for i, n in enumerate(NAMES)}
    return Reach(peak_bytes=peak * MIB, step_seconds=seconds, overhead=seconds - 1, choices=choices)


def curve() -> Curve:
    total = tuple(MIB * t for t in (500, 600, 700, 900, 800, 700, 600, 550))
    growing = tuple(MIB * t for t in (0, 0, 0, 0, 50, 100, 100, 50))
    return Curve(
        total=total,
        fixed=(500 * MIB,) * 8,
        growing=growing,
        ops=800,
        spans=(
            Span(phase="forward", start=0, stop=350),
            Span(phase="backward", start=350, stop=700),
            Span(phase="optimizer", start=700, stop=800),
        ),
        peak_op=320,
        peak_target="aten.mm.default",
        peak_phase="backward",
        peak_module="lm_head",
    )


def explanation(**changes: object) -> Explanation:
    alive = Alive(
        op="silu",
        place="mlp.act_fn",
        units="model.layers.20-31",
        shape=(4, 2048, 14336),
        dtype="bf16",
        bytes=10 * MIB,
        count=12,
        purpose="kept for backward",
    )
    said = Explanation(
        model="llama-8b",
        settings={"dtype": "bf16", "batch_size": 4, "seq_len": 2048},
        device="NVIDIA RTX 4090",
        plan="the solver's plan for 24GB",
        status="simulated",
        choices=CHOICES,
        basis="modelled",
        basis_note="seconds are modelled by a roofline of rtx4090",
        budget=ResolvedBudget(asked="950MiB", bytes=950 * MIB),
        peak_bytes=900 * MIB,
        save_all_peak=1400 * MIB,
        smallest_peak=700 * MIB,
        holdings=(
            Holding(name="weights", peak_bytes=500 * MIB, most_bytes=500 * MIB),
            Holding(name="gradients", peak_bytes=0, most_bytes=300 * MIB),
            Holding(name="kept for backward", peak_bytes=400 * MIB, most_bytes=400 * MIB, comes_and_goes=True),
        ),
        units=(Slice(name="model.layers.20-31", bytes=30 * MIB, count=12), Slice(name="(rest)", bytes=40 * MIB)),
        curve=curve(),
        moment=Moment(
            op=320,
            target="aten.mm.default",
            phase="backward",
            module="lm_head",
            alive=(alive,) * 3,
            other_bytes=9,
            other_count=2,
        ),
        fronts=(
            Front(
                units="model.layers.0-31",
                cls="LlamaDecoderLayer",
                count=32,
                bargains=(
                    Bargain(choice=SAVE, kept_bytes=30 * MIB, extra_seconds=0.0, taken=12),
                    Bargain(choice=RECOMPUTE, kept_bytes=2 * MIB, extra_seconds=0.028, taken=20, dominated=True),
                    Bargain(choice=OFFLOAD, kept_bytes=0, extra_seconds=0.06, taken=2, dominated=True, hides=True),
                ),
                left_out=3,
            ),
        ),
        why=Why(chosen=reach(900, 1.5, 20), leaner=reach(872, 1.53, 21), faster=reach(956, 1.4, 18)),
        budgets=(
            BudgetStep(budget_bytes=1400 * MIB, label="100%act", reach=reach(1400, 1.0, 0)),
            BudgetStep(budget_bytes=950 * MIB, label="950MiB", reach=reach(900, 1.5, 20), ours=True),
            BudgetStep(budget_bytes=MIB, label="0%act", reach=None),
        ),
        limits=(
            Largest(dimension="batch size", plan="save everything", value=None, now=4),
            Largest(dimension="batch size", plan="leanest", value=11, peak_bytes=940 * MIB, now=4),
        ),
        notes=("a note",),
    )
    return said.model_copy(update=changes)


def printed(width: int, encoding: str = "utf-8", **changes: object) -> str:
    screen, raw = console(width, encoding)
    print_explanation(explanation(**changes), screen)
    return raw.getvalue().decode(encoding)


def test_sizes_that_cannot_be_asked_for_are_said_to_be_unknown() -> None:
    why = "--batch-size has no effect on train:make, which makes its own model and batch"
    limit = Largest(dimension="batch size", plan="leanest", value=None, now=4, why=why)
    (said,) = largest_words(explanation(limits=(limit,)))
    assert f"not known with the leanest plan; now 4 ({why})" in said and "none fits" not in said


@pytest.mark.parametrize("width", [80, 120])
def test_an_explanation_on_screen(width: int) -> None:
    text = printed(width)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in text and "\x1b" not in text
    assert len(lines) < 100, "two screens"
    said = " ".join(text.split())
    assert "Peak 900 MiB (944 MB) of 950 MiB (budget 950MiB): 50.0 MiB free" in said
    assert "leanest plan 700 MiB (simulated)" in said
    assert "weights 500 MiB 55.6 %" in said and "gradients — 300 MiB" in said
    assert "model.layers.20-31 ×12 30.0 MiB 360 MiB 90.0 %" in said
    assert "Peak at op 320 of 800: aten.mm.default, backward in lm_head" in said
    assert "4×2048×14336 bf16" in said and "12 of 32" in said and "beaten by another" in said
    assert "2 of 32 (copies hide)" in said
    assert "needs 28.0 MiB less and is ~30.0 ms slower, ~1.07 ms per MiB: 1 layer from save to recompute" in said
    assert "needs 56.0 MiB more and is ~100 ms faster" in said and "2 layers from recompute to save" in said
    assert "nothing fits" in said and "none fits saving everything, 11 with the leanest plan; now 4" in said
    assert "seconds are modelled by a roofline of rtx4090" in said and "a note" in said


def test_poor_encodings_get_plain_characters() -> None:
    text = printed(80, "cp1252")
    assert "█" not in text and "#" in text and "░" not in text


def test_the_chart() -> None:
    drawn = draw(curve(), 8, 5)
    rows = [line for _, line in drawn.lines]
    assert rows[0][3] == "█" and rows[0].strip() == "█", "only the peak reaches the top"
    assert drawn.peak_column == 3 and drawn.high == 900 * MIB and 0 < drawn.low < 500 * MIB
    assert rows[-1] == "░" * 8 and "▒" in rows[-3] + rows[-2]
    whole = draw(curve(), 8, 5, budget_bytes=5000 * MIB)
    assert whole.lines == drawn.lines, "a budget far away is not drawn"
    near = draw(curve(), 8, 5, budget_bytes=1000 * MIB)
    assert near.high == 1000 * MIB and near.lines[0][1].count("┄") == 7 and "budget" in near.lines[0][0]
    narrow = draw(curve(), 3, 4)
    assert max(line.count("█") for _, line in narrow.lines) >= 1, "no peak is lost"
    assert draw(Curve(total=(), fixed=(), growing=(), ops=0, spans=(), peak_op=0), 4, 2).lines[0][1] == ""


def test_ops_are_tab_separated() -> None:
    screen, raw = console(20)
    print_ops(small_graph(), screen)
    lines = raw.getvalue().decode().splitlines()
    assert len(lines) == 1 + len(small_graph().ops)
    assert lines[1].split("\t") == ["0", "forward", "aten.mm.default", "embed", "uint8[10]", "10", "0", "1010"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_downsampling_loses_no_peak(values: list[int], points: int) -> None:
    sampled = resampled(values, min(points, len(values)))
    assert max(values[i] for i in sampled) == max(values) and len(set(sampled)) == min(points, len(values))
