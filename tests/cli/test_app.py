import re
import subprocess
import sys
from typing import Any

import pytest
import typer

from autockpt.cli.app import PANELS, VERBS, build

HEAVY = ("torch", "optuna", "transformers", "scipy", "numpy", "matplotlib", "jinja2")


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from autockpt.cli.app import build\n"
        "try: build()(['--help'])\n"
        f"except SystemExit: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stderr.strip() == "[]", done.stderr
    assert all(verb.__name__ in done.stdout for verb in VERBS)


def test_every_verb_has_help_that_fits_80_columns(autockpt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for verb in VERBS:
        result = autockpt(verb.__name__, "--help")
        assert result.code == 0 and f"autockpt {verb.__name__}" in result.out
        assert max(map(len, result.out.splitlines())) <= 80


def test_the_surface_stays_small() -> None:
    import autockpt as package

    command: Any = typer.main.get_command(build())
    options = [p for verb in command.commands.values() for p in verb.params if p.param_type_name == "option"]
    assert len(VERBS) <= 8 and len(options) <= 120
    assert len([name for name in package.__all__ if name != "__version__"]) <= 11


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serch",), "search"),
        (("search", "--budgt", "24GB"), "--budget"),
        (("search", "--trials", "0"), "--trials"),
        (("verify",), "PLAN"),
        (("export", "plan.yaml"), "Missing option '--to'"),
        (("search", "--model", "llama-tiny", "--budget", "1GB", "--batch-size", "auto"), "--batch-size.* integer"),
        (("search", "--model", "llama-tiny", "--budget", "1GB", "--batch-size", "0"), "--batch-size.* 1"),
    ],
)
def test_wrong_words_are_usage_errors_that_name_what_is_meant(autockpt, arguments: tuple[str, ...], named: str) -> None:
    result = autockpt(*arguments)
    assert result.code == 2 and re.search(named, result.err) and not result.out


def test_the_version(autockpt) -> None:
    import autockpt as package

    result = autockpt("--version")
    assert result.code == 0 and result.out == f"autockpt {package.__version__}\n"


def test_help_groups_options_alike_in_every_verb(autockpt) -> None:
    shared: dict[str, set[str]] = {"--fresh": set(), "--device NAME": set()}
    for verb in VERBS:
        text = autockpt(verb.__name__, "--help").out
        found = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
        panels = [title for title in PANELS if title in found]
        assert "Output" in panels and [t for t in found if t in PANELS] == panels, verb
        assert "--out DIR" in text or "--out" not in text.split(), verb  # a folder everywhere
        assert "--json" in text, verb
        for option, told in shared.items():
            if (begin := text.find(f"  {option} ")) >= 0:
                told.add(" ".join(re.split(r"\n  -|\n\n", text[begin + 3 :])[0].partition("[default")[0].split()))
    assert all(len(told) == 1 for told in shared.values()), shared
    titles = autockpt("search", "--help").out
    assert all(f"{title}:" in titles for title in PANELS)
