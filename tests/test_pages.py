"""The commands on the pages are parsed by what they call, each of them; those of README and docs run, made small."""

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import autockpt as package
from autockpt import Plan
from autockpt.cli.app import build
from tests.analysis.logs import FORWARD, message
from tests.notebook import NOTEBOOK, executed
from tests.tuning.small import TWO_LAYERS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("results/**/*.md")),
]
PROGRAMS = ("autockpt", "python", "pytest", "sh")
INSTALLS = re.compile(r"^(python3? -m (venv|pip)|pip|names=|for|done|git|\. )")
SMALL = {"--model": TWO_LAYERS, "--batch-size": "2", "--seq-len": "32", "--budget": "60%act", "--trials": "1"}


def blocks_of(page: str) -> list[list[str]]:
    """Lines of fenced and of indented blocks, and each span of code as a block of its own."""
    fenced = [found.splitlines() for found in re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)]
    page = re.sub(r"^```\w*\n.*?^```", "", page, flags=re.M | re.S)
    indented = [found.splitlines() for found in re.findall(r"(?:^    \S.*\n?)+(?:^     +.*\n?)*", page, re.M)]
    return [*fenced, *indented, *([found] for found in re.findall(r"`([^`\n]+)`", page))]


def commands_of(page: Path) -> list[str]:
    """What a shell would be given, without what installs, what another commit runs, variables and redirections."""
    found: list[str] = []
    for block in blocks_of(page.read_text()):
        text = re.sub(r"\\\n\s*", "", "\n".join(line.strip() for line in block))
        if re.search(r"^git checkout [0-9a-f]{7}", text, re.M):
            continue
        for line in re.split(r"\n|&&|; do ", text):
            command = re.sub(r"\s+#.*| > \S+$|; done$", "", line.strip())
            command = re.sub(r"^([A-Z_]+=\S+\s+|taskset -c \d+\s+)+", "", command)
            if command.startswith("autockpt bench ") and page.name == "table.md":
                continue  # made when it was a verb, as the page beside it says
            if "$" in command:
                continue  # of docs/cluster.md, which tests/test_cluster.py follows
            if command.split(" ")[0] in PROGRAMS and " " in command and not INSTALLS.match(command):
                found.append(command)
    return found


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


def words_of(command: str) -> list[str]:
    """Its arguments; a `…` stands for what is the reader's own, brackets for what may be left out."""
    command = re.sub(r"\[(--\S+) (\w+)\S*\]", r"\1 \2", command)
    words = shlex.split(re.sub(r"\[[^\]]*\]", "", command))
    return ["3" if word == "N" else word.replace("…", "llama-tiny") for word in words]


def parses(verb: str, arguments: list[str]) -> None:
    """The verb's own parser takes the arguments; on pages some that are needed may be left out."""
    command: Any = typer.main.get_command(build())
    assert verb in command.commands, verb
    try:
        command.commands[verb].make_context(verb, list(arguments))
    except Exception as error:
        if type(error).__name__ != "MissingParameter":  # of click, or of the copy of it that typer has
            raise


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("autockpt ")])
def test_the_tools_own_parser_takes_it(command: str) -> None:
    verb, *arguments = words_of(command)[1:]
    if verb not in ("--help", "llama-tiny"):
        parses(verb, arguments)


class Parsed(Exception):
    """A program has read its arguments."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ")])
def test_a_program_that_a_page_names_takes_its_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(command)
    assert words[1] == "-m", command
    if words[2].startswith("tests."):
        takes(words[2:], monkeypatch)


def takes(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the checkout is there, and its parser takes the arguments behind its name."""
    found = importlib.util.find_spec(words[0])
    assert found is not None
    if found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{words[0]}.__main__")
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    if "def build()" in source:
        program: Any = typer.main.get_command(importlib.import_module(found.name).build())
        program.make_context(words[0], words[1:])
    if "argparse" not in source:
        return
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # theirs would stay
    with pytest.raises(Parsed):
        runpy.run_module(words[0], run_name="__main__")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pytest")])
def test_what_pytest_is_asked_for_is_there(command: str) -> None:
    words = words_of(command)[1:]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {mark.split(":")[0] for mark in settings["markers"]}
    for option, value in zip(words, [*words[1:], ""], strict=True):
        assert option != "-m" or set(value.split(" or ")) <= marks
        assert not option.startswith("tests/") or (ROOT / option.split("::")[0]).exists()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("sh ")])
def test_what_a_script_calls_is_parsed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done >> calls; echo >> calls\n')
    stand_in.chmod(0o755)
    script = ROOT / words_of(command)[1]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["sh", str(script)], cwd=tmp_path, env=environment, check=True)
    calls = [call.splitlines() for call in (tmp_path / "calls").read_text().strip().split("\n\n")]
    assert calls
    for module, *words in calls:
        assert module == "-m"
        with monkeypatch.context() as patch:
            takes(words, patch)


def test_the_readme_and_the_guides_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    words = {page.name: len(re.findall(r"\S*\w\S*", page.read_text())) for page in ROOT.glob("docs/*.md")}
    assert all(count <= 1500 for name, count in words.items() if name != "choices.md"), words


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "choices.md").read_text(), re.S))
def test_a_plan_on_a_page_is_one(block: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(block)
    plan = Plan.load(tmp_path / "plan.yaml")
    assert plan.choices and plan.status == "unmeasured"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    lines = re.findall(r"```bash\n(.*)\n```", (ROOT / "README.md").read_text())
    steps = [step.strip() for step in lines[1].split("&&")]
    assert steps[0] == "python3 -m venv .venv"
    for step in steps[2:]:
        assert step in script


# --- and run


Autockpt = Callable[..., str]


@pytest.fixture(scope="module")
def autockpt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a command line in this process, in one folder for all; its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pages"))

        def run(*arguments: str) -> str:
            patch.setattr(sys, "argv", ["autockpt", *arguments])
            done = CliRunner().invoke(build(), list(arguments), prog_name="autockpt")
            assert done.exit_code == 0, (arguments, done.stderr, done.exception)
            return done.stdout

        yield run


def on(page: str, *parts: str) -> str:
    """The first command of a page that has all these parts."""
    return next(c for c in commands_of(ROOT / page) if all(part in c for part in parts))


def small(command: str, **instead: str) -> list[str]:
    """The same command for a tiny model, few choices and one trial; ``instead``: further options' values."""
    words = words_of(command)[1:]
    for option, value in (SMALL | {f"--{name.replace('_', '-')}": value for name, value in instead.items()}).items():
        if option in words:
            words[words.index(option) + 1] = value
    if words[0] == "search" and "--choices" not in words:
        words += ["--choices", "save,recompute,offload"]
    if words[0] == "search" and "--trials" not in words:
        words += ["--trials", "1"]
    if words[0] == "search" and "--hardware" not in words and "--device" not in words:
        words += ["--device", "cpu"]
    return words


@pytest.fixture(scope="module")
def plan(autockpt: Autockpt) -> dict[str, Any]:
    """What the README's first search finds, its plan as ``plan.yaml``."""
    first = small(next(c for c in commands_of(ROOT / "README.md") if c.startswith("autockpt search")))
    return json.loads(autockpt(*first, "--plan-out", "plan.yaml", "--json"))


def test_the_first_job_has_a_feasible_and_binding_budget(autockpt: Autockpt) -> None:
    command = next(c for c in commands_of(ROOT / "README.md") if "llama-small" in c)
    few = "--choices", "save,recompute", "--trials", "1", "--hardware", "cpu"
    answer = json.loads(autockpt(*words_of(command)[1:], *few, "--json"))
    peaks = {row["name"]: row["predicted"]["peak_bytes"] for row in answer["rows"]}
    assert peaks["recompute all"] <= peaks["ours"] <= answer["budget"]["bytes"] < peaks["none"]


def test_a_measured_search_its_history_and_its_plan(autockpt: Autockpt, plan: dict[str, Any]) -> None:
    assert plan["plan"]["measured"]["peak_bytes"] <= plan["budget"]["bytes"]
    assert autockpt("history", plan["run_directory"])
    assert "_checkpointing: true" in autockpt("export", "plan.yaml", "--to", "transformers")
    assert "equal" in autockpt("verify", "plan.yaml", "--device", "cpu")


def test_what_becomes_of_a_run(autockpt: Autockpt, plan: dict[str, Any]) -> None:
    run = Path(plan["run_directory"])
    (run / "report.html").unlink()
    assert "report.html" in autockpt("history", str(run), "--page")
    assert [page.name for page in run.glob("*.html")] == ["report.html"]
    assert run.name in autockpt("history")
    assert "Trial 0: none" in autockpt("history", str(run), "--trial", "0")
    autockpt("history", str(run), "--trial", "0", "--plan-out", "trial.yaml")
    assert Plan.load(Path("trial.yaml")).measured
    assert json.loads(autockpt("explain", str(run), "--json"))["status"] == "measured"


def test_a_run_in_python_as_its_page_shows_it(plan: dict[str, Any]) -> None:
    """The line for pandas only where that is installed."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "report.md").read_text(), re.M | re.S)
    if importlib.util.find_spec("pandas") is None:
        block = re.sub(r"^run\.frame\(\).*\n", "", block, flags=re.M)
    block = block.replace("results/…", plan["run_directory"]).replace('"plan.yaml"', '"third.yaml"')
    exec(block, {"autockpt": package})
    assert Plan.load(Path("third.yaml")).choices


def test_one_plan_for_sequences_of_all_lengths(autockpt: Autockpt) -> None:
    """Simulated; ``tests/integrations/test_at_start.py`` measures one."""
    Path("lengths.txt").write_text("32\n8 9\n")
    command = small(on("docs/integrations.md", "--lengths"), budget="24GB")
    command[-2:] = "--hardware", "rtx4090"  # instead of --device cpu
    assert json.loads(autockpt(*command, "--json"))["settings"]["seq_len"] == 32


def test_a_simulated_plan_for_adapters_is_gone_on_from(autockpt: Autockpt) -> None:
    """Without real steps; those are taken among the campaigns."""
    pytest.importorskip("peft")
    simulated = small(on("docs/simulation.md", "--lora", "--seq-len"))
    assert json.loads(autockpt(*simulated, "--plan-out", "PLAN", "--json"))["plan"]["workload"]["lora"] == 16
    command = small(on("docs/simulation.md", "--resume"))
    command[-2:] = "--hardware", "cpu"
    resumed = json.loads(autockpt(*command, "--json"))
    assert resumed["device"]["kind"] == "cpu" and resumed["plan"]["workload"]["lora"] == 16


def test_what_is_asked_before_there_is_a_run(autockpt: Autockpt) -> None:
    sizes = "--lora", "0", "--cards", "rtx4090", "--seq-lens", "32,64"
    rows = autockpt("estimate", TWO_LAYERS, *sizes, "--json").splitlines()
    assert {json.loads(row)["seq_len"] for row in rows} == {32, 64}
    Path("train.log").write_text(FORWARD + message())
    command = next(c for c in commands_of(ROOT / "README.md") if c.startswith("autockpt diagnose"))
    assert json.loads(autockpt(*small(command)[:-1], "diagnosed.yaml", "--json"))


def test_a_simulated_search(autockpt: Autockpt) -> None:
    command = next(c for c in commands_of(ROOT / "README.md") if "--hardware" in c)
    if "--load-in-4bit" in command:
        pytest.importorskip("bitsandbytes")
    answer = json.loads(autockpt(*small(command), "--json"))
    assert answer["plan"]["predicted"]["peak_bytes"] <= answer["budget"]["bytes"]


def test_a_step_as_a_graph_of_torch_fx(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    (block,) = re.findall(r"^```python\n(from autockpt.tracing.*?)^```", page, re.M | re.S)
    step = package.Step(torch.nn.Linear(4, 4), torch.randn(2, 4), loss=lambda model, batch: model(batch).sum())
    exec(block, {"autockpt": package, "step": step})
    assert "aten.addmm.default" in capsys.readouterr().out


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_steps_are_planned_for_and_verified(autockpt: Autockpt, plan: dict[str, Any]) -> None:
    step = ("--model", "llama-tiny", "--batch-size", "2", "--seq-len", "32", "--budget", "auto")
    command = words_of(on("docs/integrations.md", "search --compile"))[1:]
    compiled = json.loads(autockpt(*command, *step, "--trials", "1", "--device", "cpu", "--json"))
    assert compiled["plan"]["compile"] == "layers"
    assert autockpt("verify", "plan.yaml", "--device", "cpu")


def test_a_step_with_its_own_loss_is_searched_as_written() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    (block,) = re.findall(r"^```python\n(import torch\n.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["plan"].status == "measured" and names["plan"].measured.peak_bytes <= names["plan"].budget.bytes


# --- the notebook, which ``python -m tests.notebook`` executes and writes again


def wording(text: str) -> str:
    """Without numbers and hashes, which depend on the versions of torch and transformers."""
    return re.sub(r"\b[0-9a-f]{12}\b|\d[\d.,]*", "N", text)


def test_the_notebook_has_outputs_and_nobodys_paths() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}, "no error is among them"
    assert not re.search(r"(?<![\w.…])/(?:home|root|tmp|usr|work|opt|Users)/|stderr", json.dumps(outputs))
    named = re.findall(r"autockpt\.(\w+)", "".join(cells[0]["source"]))
    assert named and all(hasattr(package, name) for name in named)


def test_the_notebook_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first cell, whose text is the plan; the others print figures in tables."""
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    (printed,), *_ = executed(cells)
    assert wording("".join(printed["text"])) == wording("".join(cells[0]["outputs"][0]["text"]))
    assert (tmp_path / "runs").is_dir()
