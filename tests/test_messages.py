"""The catalogue of messages: what common mistakes print, word for word, in this one place.

Other tests look at an error's class and code. Where a text changes on purpose, ``python -m tests.test_messages`` writes
the catalogue again; read its diff.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autockpt.cli.app import build
from tests.analysis.logs import FORWARD, message

CATALOGUE = Path(__file__).with_name("messages.txt")
FILES = {
    "job.yaml": "model: llama-tiny\nbatchsize: 4\n",
    "plan.yaml": "autockpt: 1\nchoices:\n  model.layers.0: recompte\n",
    "no_job.yaml": "autockpt: 1\nchoices:\n  model.layers.0: recompute\n",
    "train.log": "all went well\n",
    "run.log": FORWARD + message(),
}
MISTAKES = (
    "search",
    "search --budget 24",
    "search --budget 24GB --timeout soon",
    "search --budget 24GB --model llama-tinny",
    "search --budget 24GB --model llama-tiny --dtype fp8",
    "search --budget 24GB --job job.yaml",
    "search --budget 24GB --job nowhere.yaml",
    "search --budget 24GB --model llama-tiny --seq-len long",
    "search --budget 24GB --choices recompte",
    "search --budget 24GB --choices save",
    "search --budget 24GB --choices chunked_loss",
    "search --budget 24GB --choices compile_budget",
    "search --budget 24GB --host-budget 8",
    "search --budget 24GB --host-budget 60%",
    "search --budget '' --hardware rtx4090",
    "search --resume nowhere.yaml",
    "search --hardware rtx4909",
    "search --hardware 'RTX 4090'",
    "search --hardware rtx4090 --device cpu",
    "search --budget 24GB --global-batch 8 --lengths 512:3",
    "search --budget 24GB --model llama-tiny --seq-len auto --lengths 512:3",
    "explain",
    "explain llama-tiny",
    "explain --model llama-tiny --ops --budget 24GB",
    "explain plan.yaml",
    "explain nothing.yaml",
    "explain .",
    "explain --model llama-tiny --budget 24",
    "explain --model llama-tiny --hardware rtx4090 --device cpu",
    "diagnose train.log",
    "diagnose absent.log",
    "diagnose .",
    "diagnose run.log --plan-out p.yaml",
    "diagnose run.log --model gpt2 --hardware rtx9999",
    "verify missing.yaml",
    "verify no_job.yaml",
    "history nothing",
    "history --plan-out x.yaml",
    "history",
    "history .",
    "export no_job.yaml --to deepspeed",
    "export missing.yaml --to axolotl",
    "estimate llama-tiny --batch-sizes x",
)


def printed(command: str) -> str:
    """The error that a command prints, without progress, in a terminal of 100 columns, and its exit code."""
    done = CliRunner().invoke(build(), shlex.split(command), prog_name="autockpt")
    error = "\n".join(line for line in done.stderr.strip().splitlines() if not re.match(r"\[ *\d", line))
    return f"$ autockpt {command}\n{error}\nexit code {done.exit_code}\n"


def catalogued() -> dict[str, str]:
    entries = CATALOGUE.read_text().split("\n\n")
    return {entry.splitlines()[0].removeprefix("$ autockpt "): entry.rstrip("\n") + "\n" for entry in entries}


@pytest.mark.slow
@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_prints_what_the_catalogue_says(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert printed(command) == catalogued()[command]


def prepare(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    import tempfile

    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        os.chdir(folder)
        entries = [printed(command) for command in MISTAKES]
    CATALOGUE.write_text("\n".join(entries))
    sys.exit()
