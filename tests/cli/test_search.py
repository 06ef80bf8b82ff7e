from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from autockpt.analysis.sentences import answer_rows, loading_lines
from autockpt.cli.search import print_answer, print_stages
from autockpt.errors import InfeasibleError
from autockpt.schema import Comparison, Listener, Measurement, SearchOutcome, SearchRequest, Verdict, WorkloadSpec
from autockpt.schema.request import BatchAnswer, BatchSetting, PipelineAnswer, StagePlan
from autockpt.schema.words import NOISE_UNKNOWN
from autockpt.tuning import search_request
from tests import samples
from tests.analysis.samples import make_run
from tests.samples import MIB, outcome, row, trial


@pytest.fixture
def asked(replace) -> list[SearchRequest]:
    """Requests that reached the search; its answer is always the same."""
    requests: list[SearchRequest] = []

    def run_search(request: SearchRequest, listener: Listener) -> SearchOutcome:
        requests.append(request)
        listener.stage("search", 1)
        listener.trial(trial(0), trial(0))
        return outcome(notes=request.notes)

    replace("autockpt.tuning", answer=run_search, search_request=search_request)
    return requests


def test_options_become_a_request(autockpt, asked: list[SearchRequest]) -> None:
    result = autockpt(
        *("search", "--budget", "60%act", "--model", "llama-tiny", "-b", "4", "--seq-len", "128", "--packed"),
        *("--dtype", "bf16", "--optimizer", "sgd", "--accumulate", "2", "--lora", "8"),
        *("--device", "cpu", "--trials", "7", "--timeout", "10m", "--seed", "3"),
        *("--choices", "save,recompute", "--storage", "sqlite:///x.db", "--out", "runs", "--plan-out", "p.yaml"),
        "--fresh",
    )
    assert result.code == 0, result.err
    (request,) = asked
    assert request.budget.text == "60%act" and request.timeout == 600 and request.trials == 7 and request.seed == 3
    spec = request.workload
    assert (spec.model, spec.batch_size, spec.seq_len, spec.packed) == ("llama-tiny", 4, 128, True)
    assert (spec.dtype, spec.optimizer, spec.accumulate, spec.lora, spec.seed) == ("bf16", "sgd", 2, 8, 3)
    assert request.space.choices == ("save", "recompute")
    assert (request.out, request.plan_out, request.fresh) == (Path("runs"), Path("p.yaml"), True)
    assert request.command[:3] == ("autockpt", "search", "--budget") and request.notes == ()


def test_results_and_progress_go_separate_ways(autockpt, asked: list[SearchRequest]) -> None:
    result = autockpt("search", "--budget", "60%", "--model", "llama-tiny")
    assert "ours" in result.out and "trial   0" not in result.out
    assert "trial   0" in result.err and "ours" not in result.err
    assert 'autockpt.apply(model, "results/' in result.out and "\x1b" not in result.out + result.err


@pytest.mark.parametrize(
    ("kind", "options", "model", "hardware"),
    [
        ("cuda", (), "llama-1b", None),
        ("cpu", ("--device", "cpu"), "llama-small", None),
        ("cpu", (), "llama-1b", "rtx4090"),
        ("cpu", ("--model", "gpt2-tiny"), "gpt2-tiny", None),
        ("cpu", ("--model", "gpt2-tiny", "--device", "cpu"), "gpt2-tiny", None),
    ],
)
def test_a_budget_is_enough(autockpt, asked, replace, kind: str, options, model: str, hardware: str | None) -> None:
    """Without an accelerator a card is simulated, but for a model or device of one's own; what was chosen is said."""
    replace("autockpt.devices", get_device=lambda name: SimpleNamespace(kind=kind))
    result = autockpt("search", "--budget", "24GB", *options)
    (request,) = asked
    assert result.code == 0 and request.workload.model == model
    assert (request.hardware and request.hardware.name) == hardware
    said = f"built-in {model} on {kind}" if hardware is None else f"simulates {model}"
    for text in (result.err, " ".join(result.out.split())):
        assert (said in text) is ("--model" not in options)
        assert ("nothing is measured" in text and "--device cpu" in text) is (hardware is not None)


def test_hardware_is_simulated_and_its_memory_is_the_budget(autockpt, asked: list[SearchRequest]) -> None:
    options = ("--model", "llama-8b", "--lora", "16", "--seq-len", "auto")
    assert autockpt("search", "--hardware", "rtx4090", *options).code == 0
    (request,) = asked
    assert request.longest and request.workload.seq_len is None
    assert request.hardware is not None and request.hardware.name == "rtx4090"
    assert request.budget.kind == "auto" and request.workload.dtype is None
    assert request.budget.headroom == "5%"


def test_a_plan_or_run_to_start_from_fills_in_what_is_not_said(
    autockpt, asked: list[SearchRequest], tmp_path: Path
) -> None:
    from autockpt.schema import ResolvedBudget, WorkloadSpec

    made = outcome(simulated=True).plan
    assert made is not None
    spec = WorkloadSpec(model="llama-8b", lora=16, batch_size=2)
    budget = ResolvedBudget(asked="20GB", bytes=20 * 10**9)
    made.model_copy(update={"workload": spec, "budget": budget}).save(tmp_path / "run" / "plan.yaml")
    (tmp_path / "run" / "question.json").write_text("{}")
    for where in (tmp_path / "run" / "plan.yaml", tmp_path / "run"):
        asked.clear()
        assert autockpt("search", "--resume", str(where), "--batch-size", "1", "--device", "cpu").code == 0
        (request,) = asked
        assert request.start is not None and request.start.status == "simulated" and request.hardware is None
        assert (request.workload.model, request.workload.lora, request.workload.batch_size) == ("llama-8b", 16, 1)
        assert request.budget.text == "20GB" and request.budget.headroom == ""


def test_nothing_fits(autockpt, replace) -> None:
    refusal = InfeasibleError("no plan fits 1 GB", remedy="Use --lora 16.", smallest_peak=2 * 2**30)
    replace("autockpt.tuning", answer=Mock(side_effect=refusal), search_request=search_request)
    result = autockpt("search", "--budget", "1GB", "--model", "llama-tiny", "--json")
    assert (result.code, result.error) == (3, "budget.infeasible") and "2.00 GiB (2.15 GB)" in result.err
    expected = {"error": "no plan fits 1 GB", "code": result.error, "exit_code": 3, "smallest_peak_bytes": 2 * 2**30}
    assert result.json | expected == result.json


def test_interrupted_with_and_without_a_plan(autockpt, replace) -> None:
    answers = [outcome(interrupted=True), outcome(interrupted=True, plan=None, plan_path=None, rows=())]
    replace("autockpt.tuning", answer=lambda request, listener: answers.pop(0), search_request=search_request)
    for has_plan in (True, False):
        result = autockpt("search", "--budget", "60%", "--model", "llama-tiny")
        assert result.code == 130 and "Interrupted" in result.out and ("ours" in result.out) == has_plan


def test_a_global_batch_is_answered_with_its_settings(autockpt, replace) -> None:
    score = Measurement(peak_bytes=1 << 30, step_seconds=2.0, noise=0.01)
    best = BatchSetting(batch_size=4, accumulate=2, plan="8 remake", score=score, work=8192)
    usual = best.model_copy(update={"batch_size": 8, "accumulate": 1, "plan": "recompute all"})
    found = {"best": best, "others": (usual,), "outcome": outcome(), "trials": 9, "seconds": 60.0}
    search = Mock(return_value=BatchAnswer(rows_per_update=8, unit="tokens", **found))
    replace("autockpt.tuning", answer=search, search_request=search_request)
    result = autockpt("search", "--budget", "24GB", "--model", "llama-tiny", "-b", "2", "--global-batch", "8")
    assert result.code == 0, result.err
    request = search.call_args.args[0]
    assert request.rows_per_update == 8 and request.workload.batch_size == 2
    assert "--per_device_train_batch_size 4 --gradient_accumulation_steps 2" in result.out
    assert "4,096" in result.out and "recompute all" in result.out


def test_a_search_ends_with_a_page_and_outlives_one_that_fails(autockpt, replace, tmp_path: Path) -> None:
    import_module("autockpt.analysis.page")  # before the search is replaced, which it uses parts of
    run = make_run(tmp_path / "results")
    replace(
        "autockpt.tuning",
        answer=lambda request, listener: outcome(run_directory=run.path),
        search_request=search_request,
    )
    result = autockpt("search", "--budget", "60%", "--model", "llama-tiny")
    page = run.path / "report.html"
    assert result.code == 0 and page.exists() and f"The whole run on one page: {page}" in result.err
    page.unlink()
    (run.path / "profile.json").write_text("{}")
    result = autockpt("search", "--budget", "60%", "--model", "llama-tiny")
    assert result.code == 0 and not page.exists() and "could not be written" in result.err and "ours" in result.out


URL = "postgresql://optuna:hunter2@host/db"


@pytest.mark.parametrize("words", [("--storage", URL), (f"--storage={URL}",)])
def test_a_password_reaches_the_storage_and_nothing_else(autockpt, asked, words: tuple[str, ...]) -> None:
    result = autockpt("search", "--budget", "60%", "--model", "llama-tiny", *words)
    (request,) = asked
    assert request.storage == URL and "AUTOCKPT_STORAGE" in result.err
    kept = f"{request!r} {request.model_dump_json()} {' '.join(request.command)}"
    assert "hunter2" not in kept + result.out + result.err and "optuna:***@host" in " ".join(request.command)


def test_the_environment_names_the_storage(autockpt, asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCKPT_STORAGE", URL)
    result = autockpt("search", "--budget", "60%", "--model", "llama-tiny")
    other = autockpt("search", "--budget", "60%", "--model", "llama-tiny", "--storage", "sqlite:///x.db")
    assert [request.storage for request in asked] == [URL, "sqlite:///x.db"]
    assert "hunter2" not in result.out + result.err and "AUTOCKPT_STORAGE" not in result.err + other.err


def test_a_stray_url_is_refused_without_its_password(autockpt, asked) -> None:
    result = autockpt("search", "--budget", "60%", URL)
    assert result.code == 2 and "optuna:***@host" in result.err and "hunter2" not in result.err


def test_neither_a_bug_nor_its_log_shows_a_password(autockpt, replace, monkeypatch, tmp_path: Path) -> None:
    replace("autockpt.tuning", answer=Mock(side_effect=KeyError(URL)), search_request=search_request)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = autockpt("search", "--budget", "60%", "--model", "llama-tiny", "--storage", URL, "--json")
    (log,) = tmp_path.glob("autockpt-error-*.log")
    assert result.code == 4 and "hunter2" not in result.out + result.err + log.read_text()


printed = partial(samples.printed, print_answer)


def cells(text: str, plan: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(plan))


def noisy(name: str, verdict: Verdict, peak: float, seconds: float, noise: float) -> Comparison:
    plain = row(name, verdict, peak, seconds, (peak, seconds))
    assert plain.measured is not None
    return plain.model_copy(update={"measured": plain.measured.model_copy(update={"noise": noise})})


def test_an_overhead_comes_with_its_interval() -> None:
    rows = (noisy("none", "over_budget", 500, 1.0, 0.03), noisy("ours", "fits", 400, 1.1, 0.04))
    assert answer_rows(rows, 450 * MIB)[-1].overhead_noise == pytest.approx(0.05)
    answer = outcome().model_copy(update={"rows": rows})
    assert "±5.0 %" in printed(answer) and NOISE_UNKNOWN not in printed(answer)
    once = answer.model_copy(update={"rows": (*rows, noisy("every-2", "fits", 400, 1.1, 1.0))})
    assert "±?" in cells(printed(once), "every-2") and NOISE_UNKNOWN in printed(once)


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_answer_fits_the_screen(width: int) -> None:
    for answer in (outcome(), outcome(none_fits=False), outcome(simulated=True)):
        text = printed(answer, width=width)
        free = ("    handle =", "Written to")  # lines to copy are never broken
        assert all(len(line) <= width for line in text.splitlines() if not line.startswith(free))
        assert "…" not in text


def test_everything_that_matters_is_there() -> None:
    text = printed(outcome(), width=120)
    assert "450 MiB (472 MB)" in text and "weights, buffers, gradients" in text
    assert "441 MiB" in cells(text, "ours") and "448 ms ±0.8 %" in cells(text, "ours")
    assert "+8.7 %" in cells(text, "ours") and "~451 ms" in text
    assert cells(text, "none").split()[1] == "no" and cells(text, "every-2").split()[1] == "yes"
    assert "model.layers.5-11: recompute" in text and "....ORRRRRRR" in text and "measured" in text
    for line in loading_lines("results/llama-tiny_cpu_60pct-act_1a2b3c4d/plan.yaml"):
        assert f"    {line}\n" in text
    assert "31 trials measured in 93.2 s" in text and "A note." in text


def test_save_everything_that_does_not_fit_says_so() -> None:
    text = printed(outcome(none_fits=False))
    assert all(word in cells(text, "none") for word in ("OOM", "~612 MiB", "~409 ms"))
    assert "~+10.3 %" in cells(text, "ours") and "~ simulated, not measured" in text
    unmeasured = outcome(rows=(row("none", "not_measured", 612, 0.4, None), row("ours", "fits", 441, 0.5, None)))
    assert "~612 MiB" in cells(printed(unmeasured), "none") and " no " in cells(printed(unmeasured), "none")


def test_all_stages_stand_in_one_table() -> None:
    one = outcome()
    one = one.model_copy(update={"budget": one.budget.model_copy(update={"headroom": "5%"})})
    assert one.plan is not None
    stages = tuple(
        StagePlan(stage=f"{i}/2", layers=12, plan=one.plan, path=Path(f"plan_{i}.yaml"), outcome=one) for i in (0, 1)
    )
    found = PipelineAnswer(stages=stages, faster_cut=(13, 11), cut_seconds=0.4)
    text = samples.printed(print_stages, found, width=100)
    assert cells(text, "1/2").split()[:3] == ["1/2", "12", "441"] and "`stage: 13,11`" in " ".join(text.split())
    assert "plan_0.yaml" in text and "plan_1.yaml" in text and f"{one.budget.asked} less 5%" in text


def test_ranks_are_shown_where_they_differ() -> None:
    ours = row("ours", "fits", 441, 0.45, (441, 0.45))
    for peaks, shown in (((441 * MIB, 441 * MIB), False), ((441 * MIB, 440 * MIB), True)):
        measured = ours.measured.model_copy(update={"peak_by_rank": peaks, "seconds_by_rank": (0.45, 0.45)})
        text = printed(outcome(rows=(ours.model_copy(update={"measured": measured}),)))
        assert ("by rank: peak 441 MiB, 440 MiB" in text) is shown and "step 450" not in text


def test_a_simulated_answer_shows_no_measurement() -> None:
    text = printed(outcome(simulated=True))
    assert "~441 MiB" in cells(text, "ours") and "Nothing was measured" in text
    assert "±" not in text and "31 trials simulated" in text


def test_without_a_plan_there_is_nothing_to_load() -> None:
    text = printed(outcome(plan=None, plan_path=None, interrupted=True, rows=()))
    assert "import autockpt" not in text and "nothing that fits was measured yet" in text


def test_paths_to_load_are_quoted() -> None:
    assert loading_lines('odd "name".yaml')[1] == 'handle = autockpt.apply(model, "odd \\"name\\".yaml")'


def test_a_simulated_plan_names_the_commands_that_measure_it() -> None:
    found = outcome()
    assert found.plan is not None
    for options, command in (
        ({}, "autockpt verify results"),
        ({"shard": "2x4"}, "torchrun --nproc-per-node 8"),
        ({"ddp": "views"}, "torchrun --nproc-per-node N"),
        ({"keep_gradients": True}, "No command"),
    ):
        work = WorkloadSpec.model_validate({"model": "llama-tiny", **options})
        plan = found.plan.model_copy(update={"source": "simulated", "workload": work})
        text = " ".join(printed(found.model_copy(update={"plan": plan})).split())
        assert command in text and ("autockpt verify results" in text) is (not options)


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
