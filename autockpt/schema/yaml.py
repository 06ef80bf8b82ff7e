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


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - the class attribute that PyYAML reads


for _tag, _regex, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,40})", list("-+0123456789")),
    ("float", r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)", list("-+.0123456789")),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_regex})$"), _first)


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
    document = Document(name=name, error=error)
    if len(text) > MAX_BYTES:
        raise error(f"{name} is larger than {MAX_BYTES // 1000} KB", remedy="This is not a file that autockpt wrote.")
    try:
        _refuse_unsafe(text, document)
        loader = _CoreLoader(text)
        try:
            node = loader.get_single_node()
            document.data = None if node is None else _build(loader, node, (), document)
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


def _refuse_unsafe(text: str, document: Document) -> None:
    """Walk the flat stream of events first: what is refused here never gets built, and recursion stays shallow."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_CoreLoader):
        line = event.start_mark.line + 1
        document.lines[()] = 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _at(document, line, "anchors and aliases are not allowed", "Write the value out. " + _QUOTE)
        if getattr(event, "tag", None):
            raise _at(document, line, f"the tag {event.tag!r} is not allowed", "Use plain values only.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if depth > MAX_DEPTH:
            raise _at(document, line, "nested too deeply", "This is not a file that autockpt wrote.")
        if documents > 1:
            raise _at(document, line, "a second document begins here", "Keep one document per file.")


_QUOTE = 'A name that begins with * must stand in quotes: "**.mlp": recompute.'


def _build(loader: yaml.SafeLoader, node: yaml.Node, loc: Loc, document: Document) -> Any:
    document.lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, child, (*loc, i), document) for i, child in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise _at(document, line, "a key must be a plain name", "Write key: value.")
        key = key_node.value
        if key in result:
            first = document.lines[(*loc, key)]
            raise _at(document, line, f"{key!r} stands twice, first on line {first}", "Leave one of the two.")
        document.lines[(*loc, key)] = line
        result[key] = _build(loader, value_node, (*loc, key), document)
    return result


def _at(document: Document, line: int, message: str, remedy: str) -> UsageError:
    return document.error(f"{document.name}:{line}: {message}", remedy=remedy)


_OPENED = {
    "while parsing a flow sequence": "a [",
    "while parsing a flow mapping": "a {",
    "while parsing a flow node": "a [ or {",
    "while scanning a quoted scalar": "a quote",
}


def _syntax_error(bad: yaml.MarkedYAMLError, text: str, document: Document) -> UsageError:
    mark = bad.problem_mark or bad.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    content = lines[line - 1].strip() if line <= len(lines) else ""
    if mark and "'\\t'" in (bad.problem or ""):  # a tab where a key or value should begin
        indented = not lines[mark.line][: mark.column].strip()
        message = "indented with a tab" if indented else "a tab stands between words"
        rest = lines[mark.line][mark.column :].strip()
        return _at(document, line, f"{message}; YAML takes spaces", f"Put spaces before: {_short(rest)}")
    opened, at = _OPENED.get(bad.context or ""), bad.context_mark.line if bad.context_mark else 0
    if opened and (line > at + 1 or "stream" in (bad.problem or "")):
        if at >= len(lines) or not lines[at].strip():  # the file ends where a value should be
            return _at(document, line, f"the file ends before {opened} is closed", "Close it, or take it away.")
        return _at(document, at + 1, f"{opened} that begins here is not closed", f"The line reads: {_short(lines[at])}")
    began = f"What is wrong may begin on line {bad.context_mark.line + 1}." if bad.context_mark else "Correct it there."
    remedy = _QUOTE if content.startswith("*") else f"The line reads: {_short(content)}" if content else began
    return _at(document, line, bad.problem or "not valid YAML", remedy)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
