from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autockpt.schema import (
    SAVE,
    DeviceInfo,
    Environment,
    Plan,
    Prediction,
    ResolvedBudget,
    Unit,
    WorkloadSpec,
)
from tests.analysis.samples import make_run
from tests.cli.test_explain_table import MIB, explanation


class Asked:
    """Stands for the package that computes; remembers questions."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.answer = explanation()

    def explain(self, question: Any, listener: Any = None) -> Any:
        self.questions.append(question)
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    monkeypatch.setattr("autockpt.analysis.explain.explain", stand_in.explain)
    return stand_in


def simulated_for(card: str, budget: ResolvedBudget | None = None) -> Plan:
    return Plan.create(
        {"h.0": SAVE},
        [Unit(name="h.0", cls="Block", kind=0)],
        source="simulated",
        predicted=Prediction(peak_bytes=1, step_seconds=0.1),
        workload=WorkloadSpec(model="llama-tiny"),
        environment=Environment(
            device=DeviceInfo(kind="cuda", name="Card", capacity_bytes=1, overhead_bytes=0),
            versions={"simulated": card},
        ),
        budget=budget,
    )


def test_a_budget_is_explained(autockpt, asked: Asked) -> None:
    result = autockpt("explain", "--model", "llama-tiny", "-b", "2", "--budget", "24GB", "--no-limits")
    assert result.code == 0, result.err
    assert "Where the bytes go" in result.out and "Why this plan" in result.out
    (question,) = asked.questions
    assert question.spec == WorkloadSpec(model="llama-tiny", batch_size=2)
    assert question.budget.text == "24GB" and question.plan is None and question.limits is False


def test_a_simulated_plan_is_explained_on_its_own_device(autockpt, asked: Asked, tmp_path: Path) -> None:
    def write(name: str) -> None:
        simulated_for(name).save(tmp_path / "plan.yaml", existing="replace")

    write("rtx4090")
    for arguments, hardware in (((), "rtx4090"), (("--hardware", "h100"), "h100"), (("--device", "cpu"), None)):
        assert autockpt("explain", "plan.yaml", *arguments).code == 0
        found = asked.questions[-1].hardware
        assert (found and found.name) == hardware
    write("my-card")
    result = autockpt("explain", "plan.yaml")
    assert (result.code, result.error) == (2, "usage") and "my-card" in result.err


@pytest.mark.slow
def test_a_plans_own_budget_stands_and_a_share_is_anew(autockpt, asked: Asked, tmp_path: Path) -> None:
    def explained(budget: str, *arguments: str, headroom: str = "") -> Any:
        held = ResolvedBudget(asked=budget, bytes=950, headroom=headroom, headroom_bytes=50)
        simulated_for("rtx4090", held).save(tmp_path / "plan.yaml", existing="replace")
        assert autockpt("explain", "plan.yaml", *arguments).code == 0
        return asked.questions[-1].budget

    assert explained("60%") is None and explained("1KB", "--hardware", "h100") is None
    assert explained("auto", "-b", "4") is None
    for budget, arguments in (("60%act", ("-b", "4")), ("60%", ("--hardware", "h100")), ("auto", ("--device", "cpu"))):
        again = explained(budget, *arguments)
        assert again.text == budget and again.headroom is None
    assert explained("auto", "--hardware", "h100", headroom="2%").headroom.text == "2%"
    lent = explained("1KB", "--headroom", "10%")
    assert lent.budget_bytes == 900 and lent.text == "1KB"


def test_a_simulated_budget_has_the_headroom_of_a_search(autockpt, asked: Asked) -> None:
    given = ("explain", "--model", "llama-tiny", "--hardware", "rtx4090", "--budget", "10GB")
    for more, size in (((), 95 * 10**8), (("--headroom", "0%"), 10**10)):
        assert autockpt(*given, *more).code == 0
        assert asked.questions[-1].budget.budget_bytes == size


def test_json_is_the_whole_answer(autockpt, asked: Asked) -> None:
    result = autockpt("explain", "--model", "llama-tiny", "--json")
    assert result.code == 0 and result.json == asked.answer.model_dump(mode="json")


def test_a_budget_that_nothing_fits_is_said_with_exit_code_3(autockpt, asked: Asked) -> None:
    asked.answer = explanation(budget=ResolvedBudget(asked="1MiB", bytes=MIB))
    result = autockpt("explain", "--model", "llama-tiny", "--budget", "1MiB")
    assert result.code == 3 and "too much" in result.out and "700 MiB" in result.out


def test_a_plan_brings_its_workload(autockpt, asked: Asked, tmp_path: Path) -> None:
    text = "autockpt: 1\nworkload:\n  model: llama-tiny\n  batch_size: 8\nchoices:\n  model.layers.0-3: recompute\n"
    (tmp_path / "plan.yaml").write_text(text)
    assert autockpt("explain", "plan.yaml", "--seq-len", "16").code == 0
    (question,) = asked.questions
    assert question.spec == WorkloadSpec(model="llama-tiny", batch_size=8, seq_len=16)
    assert question.plan is not None and question.plan_path == Path("plan.yaml")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--model"),
        (("nothing.yaml",), "nothing.yaml"),
        ((".",), ""),
        (("--model", "llama-tiny", "--budget", "24"), "budget"),
        (("--model", "llama-tiny", "--headroom", "2%"), "--budget"),
        (("--model", "llama-tiny", "--ops", "--budget", "24GB"), "--ops"),
        (("--model", "llama-tiny", "--hardware", "rtx4090", "--device", "cpu"), "--device"),
        (("--model", "llama-tiny", "--hardware", "rtx409"), "rtx4090"),
        (("llama-8b",), "autockpt explain --model llama-8b"),
    ],
)
def test_wrong_questions(autockpt, asked: Asked, arguments: tuple[str, ...], named: str) -> None:
    result = autockpt("explain", *arguments)
    assert result.code == 2 and result.error in ("usage", "run")
    assert named in result.err and not result.out and not asked.questions


def test_a_run_is_explained_from_its_files(autockpt, asked: Asked, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    result = autockpt("explain", str(run.path), "--json")
    assert not asked.questions and result.code == 0, result.err
    assert result.json["choices"].keys() == {"h.0", "h.1"}
    assert autockpt("explain", str(run.path), "--budget", "1KB").code == 3 and not asked.questions
    for option in ("--limits", "-b4", "--device=cpu"):
        assert autockpt("explain", str(run.path), "--model", "llama-tiny", option).code == 0
    assert len(asked.questions) == 3
