"""Safe YAML with line numbers, by the marks of PyYAML's nodes, so that an error can say ``plan.yaml:14: …``.

No anchors, no merge keys, no dates; keys are strings as written, and a key that stands twice is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from autockpt.errors import UsageError
from autockpt.schema.base import did_you_mean, short
from autockpt.schema.files import read_regular, reason

MAX_BYTES = 1_000_000
M = TypeVar("M", bound=BaseModel)
_KINDS = ("null", "bool", "int", "float")  # what plain scalars are besides text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - the class attribute that PyYAML reads
        first: [(tag, regex) for tag, regex in known if tag.rpartition(":")[2] in _KINDS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass
class Document:
    """A parsed file: its path as given, plain data, the node that they were made of, and the error for complaints."""

    name: str
    data: Any = None
    node: yaml.Node | None = None
    error: type[UsageError] = UsageError

    def where(self, *loc: str | int) -> str:
        """``plan.yaml:14``: the line of the innermost known part of ``loc``."""
        return f"{self.name}:{self._found(loc)[1] + 1}"

    def _found(self, loc: Sequence[str | int]) -> tuple[int, int]:
        """How many parts of ``loc`` the file has, and the line of the last of them, from 0."""
        node, line = self.node, 0
        for depth, part in enumerate(loc):
            at = None
            if isinstance(node, yaml.MappingNode):
                at, node = next(((key, value) for key, value in node.value if key.value == part), (None, None))
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                at = node = node.value[part]
            if at is None:
                return depth, line
            line = at.start_mark.line
        return len(loc), line

    def complain(self, loc: Sequence[str | int], message: str, remedy: str = "") -> UsageError:
        """The error to raise about one part of the file."""
        return self.error(f"{self.where(*loc)}: {message}", remedy=remedy)

    def validate(self, model: type[M], /, **more: Any) -> M:
        """Build a data object from the document, and from ``more`` what it does not say itself.

        The first violation becomes an error with its line.
        """
        try:
            return model.model_validate({**more, **self.data} if isinstance(self.data, dict) else self.data)
        except ValidationError as error:
            raise self._explain(error, model) from None

    def _explain(self, error: ValidationError, model: type[BaseModel]) -> UsageError:
        errors = error.errors()
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        loc, kind = first["loc"], first["type"]
        if kind == "extra_forbidden":
            near = did_you_mean(str(loc[-1]), model.model_fields) if len(loc) == 1 else ""
            return self.complain(loc, f"unknown key {loc[-1]!r}", f"{near}Remove it, or correct its spelling.")
        if kind == "missing":
            return self.complain(loc, f"{'.'.join(map(str, loc))!r} is missing", f"Add a line {loc[-1]}: …")
        if kind == "model_type" and not loc:
            return self.complain(loc, "this file holds no settings", "Write one `name: value` per line.")
        message = first["msg"].removeprefix("Value error, ")
        remedy = first.get("ctx", {}).get("remedy") or f"It reads {short(first['input'])} now."
        if not loc:  # of the whole document; its message begins with the part that it is about, if there is one
            return self.complain(tuple(message.split()[:1]), message, f"Correct it in {self.name}.")
        key = ".".join(map(str, loc[: self._found(loc)[0]]))  # without the names of alternatives
        return self.complain(loc, f"{key}: {message[:1].lower()}{message[1:]}", remedy)


def parse(text: str, name: str, error: type[UsageError] = UsageError) -> Document:
    """Parse one YAML document. ``name`` is what messages call the file.

    Raises ``error`` for bad syntax, duplicate keys, anchors, tags, several documents, or too much of anything.
    """
    if len(text) > MAX_BYTES:
        raise error(f"{name} is larger than {MAX_BYTES // 1000} KB", remedy="This is not a file that autockpt wrote.")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _check(node, set())
        return Document(name, None if node is None else loader.construct_document(node), node, error)
    except yaml.MarkedYAMLError as bad:
        line = bad.problem_mark.line if bad.problem_mark is not None else 0
        content = next(iter(text.splitlines()[line : line + 1]), "").strip()
        quote = ' A name that begins with * must stand in quotes: "**.mlp": recompute.' if content[:1] == "*" else ""
        remedy = f"The line reads {short(content)}.{quote}" if content else "A bracket or a quote is left open."
        raise error(f"{name}:{line + 1}: {bad.problem or 'not valid YAML'}", remedy=remedy) from None
    except (yaml.YAMLError, RecursionError) as bad:
        why = "nested too deeply" if isinstance(bad, RecursionError) else f"not YAML text: {bad}"
        raise error(f"{name} is {why}", remedy="Save the file as UTF-8 text that autockpt can read.") from None


def read(path: str | Path, error: type[UsageError] = UsageError) -> Document:
    """Parse a YAML file. Raises ``error`` where it cannot be read, too."""
    path = Path(path)
    try:
        return parse(read_regular(path, MAX_BYTES + 1).decode("utf-8"), str(path), error)
    except FileNotFoundError:
        raise error(f"there is no file {path}", remedy="Check the path.") from None
    except OSError as bad:
        raise error(f"{path} cannot be read: {reason(bad)}", remedy="Check the path and its permissions.") from None
    except UnicodeDecodeError:
        raise error(f"{path} is not UTF-8 text", remedy="This is not a file that autockpt wrote.") from None


def _check(node: yaml.Node, seen: set[int]) -> None:
    """Refuse what stands in two places, and make keys text as they are written."""
    if id(node) in seen:
        raise yaml.MarkedYAMLError(problem="anchors and aliases are not allowed", problem_mark=node.start_mark)
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check(child, seen)
    keys: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode) or key.value in keys:
            first = f", first on line {keys[key.value]}" if isinstance(key, yaml.ScalarNode) else ""
            problem = f"{key.value!r} stands twice{first}" if first else "a key must be a plain name"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        keys[key.value], key.tag = key.start_mark.line + 1, "tag:yaml.org,2002:str"
        _check(value, seen)
