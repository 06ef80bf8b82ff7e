from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from autockpt.diagnose.advice import advice_of, verdict_of
from autockpt.diagnose.oom_log import read_text
from autockpt.reporting.diagnosis_view import print_diagnosis
from autockpt.schema import Comparison, Prediction
from autockpt.schema.choices import parse_choice
from autockpt.schema.diagnosis import Agreement, Diagnosis, Room
from autockpt.schema.explanation import Holding
from autockpt.schema.remedy import Alternative
from tests.diagnose.logs import FORWARD, message

GIB = 2**30


def _base() -> Diagnosis:
    log = read_text(FORWARD + message())
    return Diagnosis(
        model="llama-1b",
        settings={"batch_size": 4},
        log=log,
        verdict=verdict_of(log),
        advice=advice_of(log),
        room=Room(
            budget=24 * GIB, hardware="rtx4090", capacity=25 * GIB, overhead=GIB // 2, others=GIB, said="so it is"
        ),
        holdings=(
            Holding(name="weights", peak_bytes=3 * GIB, most_bytes=3 * GIB),
            Holding(name="kept for backward", peak_bytes=22 * GIB, most_bytes=22 * GIB, comes_and_goes=True),
        ),
        agreement=Agreement(
            simulated_peak=34 * GIB,
            overflows=True,
            stage="forward",
            place="model.layers.9",
            verdicts=("It had to fail.",),
        ),
        notes=("a remark",),
    )


def planned() -> Diagnosis:
    """A diagnosis with a plan."""
    rows = tuple(
        Comparison(name=n, verdict="not_measured", predicted=Prediction(peak_bytes=p * GIB, step_seconds=s))
        for n, p, s in (("none", 34, 1.0), ("recompute all", 18, 1.3), ("ours", 23, 1.1))
    )
    choices = {"model.layers.0": parse_choice("recompute"), "model.layers.1": parse_choice("save")}
    return _base().model_copy(update={"rows": rows, "choices": choices, "plan_path": Path("plan.yaml")})


def no_plan_fits() -> Diagnosis:
    """A diagnosis with alternatives."""
    ways = (
        Alternative(
            options="--batch-size 1 --accumulate 4",
            effect="the same rows in every optimizer step",
            plan="every layer on recompute",
            peak_bytes=20 * GIB,
            step_seconds=2.5,
            relative_cost=1.25,
        ),
    )
    return _base().model_copy(update={"alternatives": ways, "smallest_peak": 27 * GIB})


def shown(said: Diagnosis, width: int = 120) -> str:
    out = io.StringIO()
    print_diagnosis(said, Console(file=out, width=width, color_system=None))
    return out.getvalue()


def test_a_plan_is_shown_beside_the_well_known_ones() -> None:
    text = shown(planned())
    for part in (
        "ran out of memory in the forward pass",
        "others",
        "kept for backward  22.0 GiB",
        "It had to fail.",
        "recompute all",
        "1.00 GiB are held by others",
        "simulated, not measured",
        "autockpt.apply(model, 'plan.yaml')",
        "a remark",
    ):
        assert part in text, part


def test_alternatives_have_their_peak_and_their_cost() -> None:
    text = shown(no_plan_fits())
    assert "No plan alone fits: the leanest needs 27.0 GiB." in text
    for part in ("--batch-size 1 --accumulate 4", "20.0 GiB", "~2.5 s", "~1.25×", "every layer on recompute"):
        assert part in text, part


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for said in (planned(), no_plan_fits()):
        lines = [line for line in shown(said, width).splitlines() if "autockpt search" not in line]
        assert max(map(len, lines)) <= width
