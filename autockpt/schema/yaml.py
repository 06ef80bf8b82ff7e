"""Safe YAML that keeps line numbers, so that an error can say ``plan.yaml:14: …``.

The core types only (null, true/false, numbers, strings): no tags, no anchors, no merge keys, no ``yes``/``no``/``on``
read as booleans, no dates. Keys are strings as written, and a key that stands twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from autockpt.errors import UsageError, plainly
from autockpt.schema.files import read_regular, reason
from autockpt.schema.suggest import closest

MAX_BYTES = 1_000_000
MAX_DEPTH = 30
M = TypeVar("M", bound=BaseModel)
Loc = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without anchors, tags and deep nesting: what it refuses never gets built."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - the class attribute that PyYAML reads
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise _refused("anchors and aliases are not allowed", event)
        if event.tag:
            raise _refused(f"the tag {event.tag!r} is not allowed", event)
        if self.depth == MAX_DEPTH:
            raise _refused("nested too deeply", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refused(problem: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


for _tag, _regex, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,40})", list("-+0123456789")),
    ("float", r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_regex})$"), _first)


@dataclass
class Document:
    """A parsed file: its path as given, plain data, the lines of all its parts, and the error class for complaints."""

    name: str
    data: Any = None
    lines: dict[Loc, int] = field(default_factory=dict)
    error: type[UsageError] = UsageError

    def where(self, *loc: str | int) -> str:
        """``plan.yaml:14``: the line of the innermost known part of ``loc``."""
        for length in range(len(loc), -1, -1):
            if (line := self.lines.get(loc[:length])) is not None:
                return f"{self.name}:{line}"
        return self.name

    def complain(self, loc: Sequence[str | int], message: str, remedy: str = "") -> UsageError:
        """The error to raise about one part of the file."""
        return self.error(f"{self.where(*loc)}: {message}", remedy=remedy)

    def validate(self, model: type[M], data: Any = None) -> M:
        """Build a data object from the document; the first violation becomes an error with its line."""
        try:
            return model.model_validate(self.data if data is None else data)
        except ValidationError as error:
            raise self._explain(error, model) from None

    def _explain(self, error: ValidationError, model: type[BaseModel]) -> UsageError:
        errors = error.errors()
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        loc: Loc = tuple(first["loc"])
        key = ".".join(str(part) for part in loc)
        if first["type"] == "extra_forbidden":
            lacking = [str(e["loc"][-1]) for e in errors if e["type"] == "missing" and e["loc"][:-1] == loc[:-1]]
            near = closest(str(loc[-1]), model.model_fields if len(loc) == 1 else lacking)
            hint = f"Did you mean {near!r}?" if near else "Remove it, or correct its spelling."
            return self.complain(loc, f"unknown key {loc[-1]!r}", hint)
        if first["type"] == "missing":
            return self.complain(loc[:-1], f"{key!r} is missing", f"Add a line {loc[-1]}: …")
        said = plainly(first["msg"].removeprefix("Value error, "))
        if not loc:  # of the whole document; its message begins with the part that it is about, if there is one
            return self.complain(tuple(said.split()[:1]), said, f"Correct it in {self.name}.")
        return self.complain(loc, f"{key}: {said[:1].lower()}{said[1:]}", f"It reads {_short(first['input'])} now.")


def parse(text: str, name: str, error: type[UsageError] = UsageError) -> Document:
    """Parse one YAML document. ``name`` is what messages call the file.

    Raises ``error`` for bad syntax, duplicate keys, anchors, aliases, tags, several documents, or too much of anything.
    """
    document = Document(name=name, lines={(): 1}, error=error)
    if len(text) > MAX_BYTES:
        raise error(f"{name} is larger than {MAX_BYTES // 1000} KB", remedy="This is not a file that autockpt wrote.")
    try:
        loader = _Loader(text)
        try:
            if (node := loader.get_single_node()) is not None:
                document.data = _build(loader, node, (), document)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as bad:
        raise _syntax_error(bad, text, document) from None
    except yaml.YAMLError as bad:
        raise error(f"{name} is not YAML text: {bad}", remedy="Save the file as UTF-8 text.") from None
    return document


def read(path: str | Path, error: type[UsageError] = UsageError) -> Document:
    """Parse a YAML file. Raises ``error`` where it cannot be read, too."""
    path = Path(path)
    try:
        return parse(read_regular(path, MAX_BYTES + 1, links=True).decode("utf-8"), str(path), error)
    except FileNotFoundError:
        raise error(f"there is no file {path}", remedy="Check the path.") from None
    except OSError as bad:
        raise error(f"{path} cannot be read: {reason(bad)}", remedy="Check the path and its permissions.") from None
    except UnicodeDecodeError:
        raise error(f"{path} is not UTF-8 text", remedy="This is not a file that autockpt wrote.") from None


def _build(loader: yaml.SafeLoader, node: yaml.Node, loc: Loc, document: Document) -> Any:
    document.lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*loc, i), document) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refused("a key must be a plain name", key_node)
        key = key_node.value
        if key in result:
            raise _refused(f"{key!r} stands twice, first on line {document.lines[(*loc, key)]}", key_node)
        document.lines[(*loc, key)] = key_node.start_mark.line + 1
        result[key] = _build(loader, value_node, (*loc, key), document)
    return result


def _syntax_error(bad: yaml.MarkedYAMLError, text: str, document: Document) -> UsageError:
    """PyYAML's own words, at the line where what is wrong begins: of a bracket or quote the one that opens it."""
    context = bad.context or ""
    mark = bad.context_mark if "flow" in context or "quoted" in context else bad.problem_mark
    line = mark.line if mark is not None else 0
    content = next(iter(text.splitlines()[line : line + 1]), "").strip()
    aliased = content.startswith("*") or "anchors" in (bad.problem or "")
    quote = ' A name that begins with * must stand in quotes: "**.mlp": recompute.' if aliased else ""
    remedy = f"The line reads: {_short(content)}.{quote}" if content else "The file ends there."
    problem = f"{context}: {bad.problem}" if mark is bad.context_mark else bad.problem
    return document.error(f"{document.name}:{line + 1}: {problem or 'not valid YAML'}", remedy=remedy)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
