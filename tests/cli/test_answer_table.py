from __future__ import annotations

import pytest

from autockpt.analysis.answer import answer_rows, loading_lines
from autockpt.cli.answer_table import print_answer
from autockpt.schema import Comparison, SearchOutcome, Verdict, WorkloadSpec
from tests.samples import MIB, console, outcome, row


def printed(answer: SearchOutcome, width: int = 80, encoding: str = "utf-8") -> str:
    screen, raw = console(width, encoding)
    print_answer(answer, screen)
    return raw.getvalue().decode(encoding)


def cells(text: str, plan: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(plan))


def noisy(name: str, verdict: Verdict, peak: float, seconds: float, noise: float) -> Comparison:
    plain = row(name, verdict, peak, seconds, (peak, seconds))
    assert plain.measured is not None
    return plain.model_copy(update={"measured": plain.measured.model_copy(update={"noise": noise})})


def test_headroom_and_overhead_are_worked_out() -> None:
    rows = {r.name: r for r in answer_rows(outcome().rows, 450 * MIB)}
    assert rows["ours"].overhead == pytest.approx(0.448 / 0.412 - 1) and not rows["ours"].overhead_predicted
    assert rows["ours"].headroom_bytes == 450 * MIB - int(440.7 * MIB) and rows["ours"].ours
    assert rows["none"].overhead is None and rows["none"].headroom_bytes is not None
    assert rows["none"].headroom_bytes < 0 and not rows["none"].ours


def test_the_overhead_is_predicted_without_a_measured_baseline() -> None:
    rows = {r.name: r for r in answer_rows(outcome(none_fits=False).rows, 450 * MIB)}
    assert rows["ours"].overhead == pytest.approx(0.451 / 0.409 - 1) and rows["ours"].overhead_predicted


def test_an_overhead_comes_with_its_interval() -> None:
    rows = (noisy("none", "over_budget", 500, 1.0, 0.03), noisy("ours", "fits", 400, 1.1, 0.04))
    assert answer_rows(rows, 450 * MIB)[-1].overhead_noise == pytest.approx(0.05)
    answer = outcome().model_copy(update={"rows": rows})
    assert "±5.0 %" in printed(answer)


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_answer_fits_the_screen(width: int) -> None:
    for answer in (outcome(), outcome(none_fits=False), outcome(dry_run=True)):
        text = printed(answer, width)
        free = ("    handle =", "Written to")  # lines to copy are never broken
        assert all(len(line) <= width for line in text.splitlines() if not line.startswith(free))
        assert "…" not in text


def test_everything_that_matters_is_there() -> None:
    text = printed(outcome(), 120)
    assert "450 MiB (472 MB)" in text and "weights, buffers, gradients" in text
    assert "441 MiB" in cells(text, "ours") and "448 ms ±0.8 %" in cells(text, "ours")
    assert "+8.7 %" in cells(text, "ours") and "~451 ms" in text
    assert cells(text, "none").split()[1] == "no" and cells(text, "every-2").split()[1] == "yes"
    assert "model.layers.5-11: recompute" in text and "....ORRRRRRR" in text and "measured" in text
    for line in loading_lines("results/llama-tiny_cpu_60pct-act_1a2b3c4d/plan.yaml"):
        assert f"    {line}\n" in text
    assert "31 trials measured in 93.2 s" in text and "A note." in text


def test_save_everything_that_does_not_fit_says_so() -> None:
    text = printed(outcome(none_fits=False), 80)
    assert "OOM" in cells(text, "none") and "does not fit" in cells(text, "none")
    assert "(simulated 612 MiB)" in text and "~409 ms" in cells(text, "none")
    assert "~+10.3 %" in cells(text, "ours") and "~ simulated, not measured" in text
    unmeasured = outcome(rows=(row("none", "not_measured", 612, 0.4, None), row("ours", "fits", 441, 0.5, None)))
    assert "does not fit" in cells(printed(unmeasured), "none") and " no " in cells(printed(unmeasured), "none")


def test_a_dry_run_shows_only_what_is_simulated() -> None:
    text = printed(outcome(dry_run=True))
    assert "simulated 441 MiB" in cells(text, "ours") and "Dry run" in text
    assert "±" not in text and "trials measured" not in text


def test_without_a_plan_there_is_nothing_to_load() -> None:
    text = printed(outcome(plan=None, plan_path=None, interrupted=True, rows=()))
    assert "import autockpt" not in text and "nothing that fits was measured yet" in text


def test_plain_output_has_no_escapes_and_paths_are_quoted() -> None:
    assert "\x1b" not in printed(outcome())
    assert loading_lines('odd "name".yaml')[1] == 'handle = autockpt.apply(model, "odd \\"name\\".yaml")'


def test_a_simulated_plan_names_the_commands_that_measure_it() -> None:
    found = outcome()
    assert found.plan is not None
    for options, command in (({}, True), ({"shard": 8}, False)):
        work = WorkloadSpec.model_validate({"model": "llama-tiny", **options})
        plan = found.plan.model_copy(update={"source": "simulated", "workload": work})
        text = " ".join(printed(found.model_copy(update={"plan": plan})).split())
        assert ("autockpt verify results" in text) is command
        assert ("No command here takes real steps with `shard: 8`: its numbers stay simulated." in text) is not command


def test_host_memory_is_a_column_where_something_is_offloaded() -> None:
    plain = outcome()
    assert " host" not in printed(plain, width=160)
    rows = tuple(
        r.model_copy(update={"predicted": r.predicted.model_copy(update={"host_bytes": 3 * MIB}), "measured": None})
        if r.name == "offload all" and r.predicted
        else r
        for r in plain.rows
    )
    assert plain.plan is not None
    plan = plain.plan.model_copy(update={"host_budget_bytes": 5 * MIB})
    text = printed(plain.model_copy(update={"rows": rows, "plan": plan}), width=160)
    assert " host" in text and "3.00 MiB" in cells(text, "offload all")
    assert "Host budget: 5.00 MiB" in text
