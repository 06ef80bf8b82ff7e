"""Private names of torch that choices rest on: few, and all there in the torch that is installed."""

import ast
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import torch
import torch._dynamo

import autockpt

_MOST = 25


def _places(tree: ast.AST) -> dict[str, str]:
    """What names of a file stand for, as far as that is torch's."""
    found = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and (path := _path(node.value, found)) is not None:
                found[target.id] = path
    return found


def _path(node: ast.AST, places: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((places[node.id], *reversed(parts))) if isinstance(node, ast.Name) and node.id in places else None


def _names(tree: ast.AST) -> Iterator[str]:
    """What is reached through a private name counts as that."""
    places = _places(tree)
    yield from places.values()
    public = {name: path for name, path in places.items() if not _is_private(path)}
    yield from (path for node in ast.walk(tree) if (path := _path(node, public)) is not None)


def _is_private(path: str) -> bool:
    parts = path.split(".")
    if path.startswith("torch.ops."):  # operators, whose names do not change
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def _found(path: str) -> bool:
    place, _, name = path.rpartition(".")
    try:
        return hasattr(import_module(place), name)
    except ImportError:
        return attrgetter(path.removeprefix("torch."))(torch) is not None


def test_private_names_are_few_and_there() -> None:
    files = [p for name in ("checkpointing", "policies") for p in (Path(autockpt.__file__).parent / name).glob("*.py")]
    names = {name for path in files for name in _names(ast.parse(path.read_text())) if _is_private(name)}
    # not the paths to others
    private = sorted(name for name in names if not any(other.startswith(f"{name}.") for other in names))
    assert all(_found(name) for name in private)
    assert 10 < len(private) <= _MOST, private
