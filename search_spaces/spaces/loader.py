"""Search spaces by name or path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from autockpt.errors import UsageError
from autockpt.schema.space import SPACE_VERSION, SearchSpace
from autockpt.schema.suggest import closest
from autockpt.schema.yaml import Document, read


def load_space(name: str) -> SearchSpace:
    """A search space shipped with autockpt by its name, or one's own by the path of a YAML file.

    Raises UsageError for an unknown name or a malformed file, naming the line.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return _validated(read(path), path.stem)
    folder, shipped = shipped_spaces()
    if name not in shipped:
        near = closest(name, shipped)
        raise UsageError(
            f"there is no search space {name!r}",
            remedy=(f"Did you mean {near}? " if near else "")
            + f"Shipped: {', '.join(shipped)}. Your own: the path of a YAML file.",
        )
    return _validated(read(folder / f"{name}.yaml"), name)


def shipped_spaces() -> tuple[Path, tuple[str, ...]]:
    """The folder of the search spaces in this installation, and their names."""
    folder = Path(str(resources.files("search_spaces.spaces")))
    return folder, tuple(sorted(p.stem for p in folder.glob("*.yaml")))


def _validated(document: Document, name: str) -> SearchSpace:
    if not isinstance(document.data, dict) or "search_space" not in document.data:
        raise document.complain(
            (), "this is not a search space", f"It must say `search_space: {SPACE_VERSION}` and `encoding:`."
        )
    return document.validate(SearchSpace, {"name": name} | document.data)
