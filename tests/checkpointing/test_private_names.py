"""Private names of torch that choices rest on: few, and all there in the torch that is installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo

import autockpt.checkpointing
import autockpt.policies

_MOST = 25
_ALIASES = {"torch": "torch", "_C": "torch._C"}


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in _ALIASES:
                yield ".".join((_ALIASES[node.id], *reversed(parts)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("package", [autockpt.checkpointing, autockpt.policies], ids=lambda p: p.__name__)
def test_private_names_are_few_and_there(package: ModuleType) -> None:
    folder = Path(package.__file__ or "").parent
    names = {name for path in folder.glob("*.py") for name in _names(ast.parse(path.read_text()))}
    private = {name for name in names if any(part.startswith("_") for part in name.split("."))}
    # not the paths to others
    private = {name for name in private if not any(other.startswith(f"{name}.") for other in private)}
    for name in private if torch.version.cuda else {name for name in private if "cuda" not in name}:
        attrgetter(name.removeprefix("torch."))(torch)
    assert 10 < len(private) <= _MOST, sorted(private)
