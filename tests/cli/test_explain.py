from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.analysis.explain import explain_run
from autockpt.analysis.explanation import Curve, Explanation, resampled
from autockpt.cli.explain import print_explanation, print_ops, sparklines
from autockpt.schema import SAVE, DeviceInfo, Environment, Graph, Plan, Prediction, ResolvedBudget, Unit, WorkloadSpec
from autockpt.schema.run_directory import plan_at
from tests.analysis.samples import make_run
from tests.samples import printed, small_graph


@pytest.fixture(scope="module")
def explanation(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """Of a run's plan, by its files."""
    run = make_run(tmp_path_factory.mktemp("runs"))
    found = explain_run(run.path, plan_at(run.path))
    assert found is not None
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, explanation: Explanation) -> Mock:
    """Stands for the package that computes."""
    monkeypatch.setattr("autockpt.analysis.explain.explain_step", stand_in := Mock(return_value=explanation))
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


def test_a_budget_is_explained(autockpt, asked: Mock) -> None:
    result = autockpt("explain", "--model", "llama-tiny", "-b", "2", "--budget", "24GB")
    assert result.code == 0, result.err
    assert "Where the bytes go" in result.out and "Why this plan" in result.out
    asked.assert_called_once()
    question, _, *plan = asked.call_args.args
    assert question.workload == WorkloadSpec(model="llama-tiny", batch_size=2) and plan == [None, None]
    assert question.budget.text == "24GB" and asked.call_args.kwargs == {"any_budget": False}


def test_a_simulated_plan_is_explained_on_its_own_device(autockpt, asked: Mock, tmp_path: Path) -> None:
    def write(name: str) -> None:
        simulated_for(name).save(tmp_path / "plan.yaml", replace=True)

    write("rtx4090")
    for arguments, hardware in (((), "rtx4090"), (("--hardware", "h100"), "h100"), (("--device", "cpu"), None)):
        assert autockpt("explain", "plan.yaml", *arguments).code == 0
        found = asked.call_args.args[0].hardware
        assert (found and found.name) == hardware
    write("my-card")
    result = autockpt("explain", "plan.yaml")
    assert (result.code, result.error) == (2, "usage") and "my-card" in result.err


def test_a_plans_own_budget_stands_in_bytes(autockpt, asked: Mock, tmp_path: Path) -> None:
    held = ResolvedBudget(asked="60%", bytes=950, headroom="5%", headroom_bytes=50)
    simulated_for("rtx4090", held).save(tmp_path / "plan.yaml")
    for arguments in ((), ("--hardware", "h100"), ("-b", "4")):
        assert autockpt("explain", "plan.yaml", *arguments).code == 0
        assert asked.call_args.args[0].budget.resolved(1, 1, 1) == held


def test_a_simulated_budget_has_the_headroom_of_a_search(autockpt, asked: Mock) -> None:
    assert autockpt("explain", "--model", "llama-tiny", "--hardware", "rtx4090", "--budget", "10GB").code == 0
    assert asked.call_args.args[0].budget.budget_bytes == 95 * 10**8


def test_a_budget_that_nothing_fits_is_said_with_exit_code_3(autockpt, asked: Mock) -> None:
    asked.return_value = asked.return_value.model_copy(update={"budget": ResolvedBudget(asked="1KB", bytes=1000)})
    result = autockpt("explain", "--model", "llama-tiny", "--budget", "1KB")
    assert result.code == 3 and "too much" in result.out


def test_a_plan_brings_its_workload(autockpt, asked: Mock, tmp_path: Path) -> None:
    text = "autockpt: 1\nworkload:\n  model: llama-tiny\n  batch_size: 8\nchoices:\n  model.layers.0-3: recompute\n"
    (tmp_path / "plan.yaml").write_text(text)
    assert autockpt("explain", "plan.yaml", "--seq-len", "16").code == 0
    asked.assert_called_once()
    question, _, plan, path = asked.call_args.args
    assert question.workload == WorkloadSpec(model="llama-tiny", batch_size=8, seq_len=16)
    assert plan is not None and path == Path("plan.yaml") and asked.call_args.kwargs == {"any_budget": True}


def test_a_run_is_explained_from_its_files(autockpt, asked: Mock, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    result = autockpt("explain", str(run.path), "--json")
    assert not asked.called and result.code == 0, result.err
    assert result.json["choices"].keys() == {"h.0", "h.1"}
    assert autockpt("explain", str(run.path), "--budget", "1KB").code == 3 and not asked.called
    for option in ("-b4", "--device=cpu"):
        assert autockpt("explain", str(run.path), "--model", "llama-tiny", option).code == 0
    assert asked.call_count == 2


@pytest.mark.parametrize("width", [80, 120])
def test_an_explanation_on_screen(width: int, explanation: Explanation) -> None:
    names = {"op": "_log_softmax_backward_data", "units": "model.layers.0-15", "place": "self_attn.q_proj"}
    wide = explanation.moment.alive[0].model_copy(update={**names, "shape": (4096, 128256), "dtype": "bfloat16"})
    moment = explanation.moment.model_copy(update={"alive": (wide,)})
    text = printed(print_explanation, explanation.model_copy(update={"moment": moment}), width=width)
    lines = text.splitlines()
    assert "4096×128256 bfloat16" in text
    assert all(len(line) <= width for line in lines) and "…" not in text and "\x1b" not in text
    assert len(lines) < 100, "two screens"
    said = " ".join(text.split())
    assert "(budget 60%act)" in said and "Measured: " in said
    for heading in ("Where the bytes go", "Memory by unit", "Bytes over time", "Choices for h.0-1", "Why this plan"):
        assert heading in said
    assert "a note about" in said


def test_the_chart() -> None:
    total = (500, 600, 700, 900, 800, 700, 600, 550)
    growing = (0, 0, 0, 0, 50, 100, 100, 50)
    curve = Curve(total=total, growing=growing, transient=(0,) * 8, ops=800, spans=(), peak_op=320)
    lines = sparklines(curve, 8)
    assert lines["all"] == "▄▅▆█▇▆▅▅" and lines["gradients, optimizer"] == "     ▁▁ "
    narrow = sparklines(curve, 3)["all"]
    assert len(narrow) == 3 and "█" in narrow, "no peak is lost"
    assert sparklines(Curve(total=(), growing=(), transient=(), ops=0, spans=(), peak_op=0), 4)["all"] == ""


def test_ops_are_tab_separated() -> None:
    lines = printed(print_ops, small_graph(), width=20).splitlines()
    assert len(lines) == 1 + len(small_graph().ops)
    assert lines[1].split("\t") == ["0", "forward", "aten.mm.default", "embed", "uint8[10]", "10", "0", "1010"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_downsampling_loses_no_peak(values: list[int], points: int) -> None:
    sampled = resampled(values, min(points, len(values)))
    assert max(values[i] for i in sampled) == max(values) and len(set(sampled)) == min(points, len(values))


@pytest.mark.slow
def test_the_ops_of_a_step_with_and_without_a_plan(autockpt, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text('autockpt: 1\nchoices:\n  "**.layers.*": recompute\n')
    job = ("--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--ops", "--json")
    plain, planned = (autockpt("explain", *plan, *job) for plan in ((), ("plan.yaml",)))
    assert plain.code == planned.code == 0, plain.err + planned.err
    before, after = (Graph.model_validate(run.json) for run in (plain, planned))
    assert after.peak_bytes < before.peak_bytes and after.flops > before.flops
    assert {op.phase for op in after.ops} - {op.phase for op in before.ops} == {"recompute"}
    lines = autockpt("explain", *job[:-1]).out.splitlines()
    assert len(lines) == 1 + len(before.ops) and lines[0].startswith("op\tphase\ttarget")
