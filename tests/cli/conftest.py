"""Verbs run in this process, with what they call replaced: these tests are about the command line alone."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from autockpt.cli.app import build


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The code of the error that was shown; empty where the options themselves were wrong, or nothing was."""
        found = re.search(r"\[([a-z_.]+)\]$", self.err, re.M)
        return found[1] if found else ""


Autockpt = Callable[..., Result]


@pytest.fixture
def autockpt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Autockpt:
    """Run ``autockpt`` with some arguments in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("AUTOCKPT_DEBUG", raising=False)

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["autockpt", *arguments])
        result = CliRunner().invoke(build(), list(arguments), prog_name="autockpt")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.stderr + result.stdout
        return Result(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a stand-in for a package that would import torch: ``replace("autockpt.tuning", run_search=…)``."""

    def put(name: str, **contents: Any) -> None:
        module = SimpleNamespace(**contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)

    return put
