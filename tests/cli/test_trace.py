from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from autockpt.schema import RECOMPUTE, Graph, Hardware, Plan, WorkloadSpec
from tests.reporting.samples import small_graph


class Tracer:
    """A tracer whose model is always the same."""

    asked: list[tuple[WorkloadSpec, object]]
    hardware: Hardware | None

    def __init__(self, spec: WorkloadSpec) -> None:
        self.spec = spec
        self.units = small_graph().units
        self.head = None
        self.settings = {"dtype": "fp32", "parameters": 12}
        self.notes = ("a note of the tracer's",)

    def trace(self, choices: object = None) -> Graph:
        Tracer.asked.append((self.spec, choices))
        return small_graph()


@pytest.fixture
def traced(replace) -> list[tuple[WorkloadSpec, object]]:
    def open_tracer(
        stack: ExitStack, hardware: Hardware | None, spec: WorkloadSpec, plan: Plan | None = None
    ) -> tuple[Tracer, WorkloadSpec]:
        Tracer.hardware = hardware
        return Tracer(spec), spec

    Tracer.asked = []
    replace("autockpt.tracing", open_tracer=open_tracer)
    return Tracer.asked


def test_the_table_and_the_line(autockpt, traced) -> None:
    result = autockpt("trace", "--model", "llama-tiny", "--batch-size", "2", "--seq-len", "8", "--seed", "5")
    assert result.code == 0, result.err
    assert "h.0-1" in result.out and "█" in result.out and "Peak" in result.out and "dtype fp32" in result.out
    assert "a note of the tracer's" in result.out
    assert traced == [(WorkloadSpec(model="llama-tiny", batch_size=2, seq_len=8, seed=5), None)]


def test_this_machine_s_step_is_traced_without_what_prices_plans(
    autockpt, traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "autockpt.profiling", None)  # its import fails; it takes a while where it does not
    assert autockpt("trace", "--model", "llama-tiny").code == 0 and traced


def test_a_plan_is_applied(autockpt, traced, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("autockpt: 1\nchoices:\n  h.*: recompute\n")
    result = autockpt("trace", "--model", "llama-tiny", "--plan", "plan.yaml")
    assert result.code == 0 and "plan plan.yaml (unmeasured)" in result.out
    assert {k: str(v) for k, v in traced[0][1].items()} == {"h.0": "recompute", "h.1": "recompute"}


def test_what_is_not_given_is_as_the_plan_was_made_with(autockpt, traced, tmp_path: Path) -> None:
    units = small_graph().units
    Plan.create({"h.0": RECOMPUTE}, units, workload=WorkloadSpec(model="llama-tiny", seq_len=8)).save("plan.yaml")
    result = autockpt("trace", "--plan", "plan.yaml", "--batch-size", "3")
    assert result.code == 0, result.err
    assert traced[0][0] == WorkloadSpec(model="llama-tiny", seq_len=8, batch_size=3)


def test_a_plan_of_another_model_is_refused(autockpt, traced, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("autockpt: 1\nchoices:\n  h.0-7: recompute\n")
    result = autockpt("trace", "--model", "llama-tiny", "--plan", "plan.yaml")
    assert result.code == 2 and "plan.yaml:3" in result.err
    Plan.create({"h.0": RECOMPUTE}, [small_graph().units[0]]).save("other.yaml")
    result = autockpt("trace", "--model", "llama-tiny", "--plan", "other.yaml")
    assert result.code == 2 and "another model" in result.err


def test_json_and_ops(autockpt, traced) -> None:
    summary = autockpt("trace", "--model", "llama-tiny", "--json").json
    assert summary["summary"]["peak"]["op"] == 11 and "graph" not in summary and summary["settings"]["dtype"] == "fp32"
    whole = autockpt("trace", "--model", "llama-tiny", "--json", "--ops").json
    assert len(Graph.model_validate(whole["graph"]).ops) == len(small_graph().ops)
    lines = autockpt("trace", "--model", "llama-tiny", "--ops").out.splitlines()
    assert len(lines) == 1 + len(small_graph().ops)


def test_a_model_is_needed(autockpt, traced) -> None:
    result = autockpt("trace")
    assert result.code == 2 and "--model" in result.err


def test_described_hardware_is_traced_as_a_search_traces_it(autockpt, traced) -> None:
    result = autockpt("trace", "--model", "llama-tiny", "--hardware", "m4-max")
    assert result.code == 0, result.err
    assert Tracer.hardware is not None and Tracer.hardware.name == "m4-max" and "simulated" in result.out
