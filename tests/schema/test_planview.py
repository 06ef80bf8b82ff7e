"""Plans as people see them: printed, and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from autockpt.schema import RECOMPUTE, SAVE, Plan, parse_choice, words
from autockpt.schema.planview import applied, choice_lines
from tests.samples import BLOCKS, UNITS, choices, row
from tests.schema.test_plan import full_plan


class Shown(HTMLParser):
    """What a page shows, and whether every tag is closed in its turn."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_choice_is_one_line_wherever_it_is_made() -> None:
    deeper = parse_choice({"kind": "offload", "window": 2})
    plan = {
        "model.layers.0-3": RECOMPUTE,
        "model.layers.4": deeper,
        "model.layers.5": RECOMPUTE,
        "model.layers.6.mlp": RECOMPUTE,
        "model.layers.7": deeper,
    }
    assert choice_lines(plan) == [
        "model.layers.0-3, 5, model.layers.6.mlp: recompute",
        "model.layers.4, 7: offload (window 2)",
    ]


def test_a_printed_plan_is_five_lines_with_what_it_does_and_what_that_costs() -> None:
    rows = (row("none", "over_budget", 900, 1.0, (910, 1.0)), row("recompute all", "fits", 400, 1.4, (405, 1.4)))
    plan = full_plan()
    plan = plan.model_copy(update={"baselines": rows})
    lines = str(plan).splitlines()
    assert len(lines) == 5
    assert plan.hash in lines[0] and plan.status in lines[0] and plan.model.name in lines[0]
    assert "recompute" in lines[1]
    assert plan.measured is not None
    assert words.compared(plan.measured, rows[0].measured, "saving everything") in lines[3]
    assert lines[4].strip() == 'autockpt.apply(model, "plan.yaml")'


def test_an_applied_plan_is_one_line_with_its_peak_and_its_step_against_the_usual_plans() -> None:
    rows = (row("none", "out_of_memory", 900, 1.0, None), row("recompute all", "fits", 400, 1.4, (405, 2.0)))
    plan = full_plan().model_copy(update={"baselines": rows})
    measured, attached = plan.measured, {"a.0": RECOMPUTE, "a.1": SAVE, "a.2": RECOMPUTE}
    assert measured is not None and measured.step_seconds < 2.0
    line = applied(plan, attached)
    assert "\n" not in line and f"plan {plan.hash}, measured: 2 recompute, 1 save; peak " in line
    faster = f"{(1 - measured.step_seconds / 2.0) * 100:.0f} % faster than recomputing every layer (±"
    assert faster in line
    assert "saving everything runs out of memory" in line
    itself = row("recompute all", "fits", 400, 1.4, (405, 2.0)).model_copy(update={"plan_hash": plan.hash})
    assert "recomputing" not in applied(plan.model_copy(update={"baselines": (itself,)}), attached)
    by_hand = applied(Plan(choices={"layers.*": RECOMPUTE}), attached)
    assert "by hand" in by_hand and "peak unknown" in by_hand


@pytest.mark.parametrize("status", ["measured", "simulated", "unmeasured"])
def test_numbers_are_called_what_they_are(status: str) -> None:
    plan = full_plan()
    if status == "simulated":
        plan = plan.model_copy(update={"source": "simulated", "measured": None})
    elif status == "unmeasured":
        plan = Plan(choices={"layers.*": RECOMPUTE})
    peak = str(plan).splitlines()[2]
    assert {"measured": "measured", "simulated": "simulated, not measured", "unmeasured": "written by hand"}[
        status
    ] in peak


def test_a_notebook_shows_a_tile_for_every_unit_and_nothing_that_names_smuggle_in() -> None:
    rows = (row("<script>alert(1)</script>", "fits", 400, 1.4, None),)
    plan = Plan.create(choices(), UNITS, model="<img src=x onerror=y>", baselines=rows)
    shown = Shown(plan._repr_html_())
    assert not shown.open
    assert shown.tags.count("span") == len(BLOCKS)
    assert not {"script", "img"} & set(shown.tags)
    assert "<script>alert(1)</script>" in shown.text
