"""Devices by name, or from a file that ``autockpt calibrate`` or a person wrote."""

from __future__ import annotations

from difflib import SequenceMatcher
from importlib import resources
from pathlib import Path

from autockpt.errors import UsageError
from autockpt.schema.hardware import Hardware
from autockpt.schema.suggest import closest
from autockpt.schema.yaml import Document, parse, read


def list_hardware() -> tuple[str, ...]:
    """Names of all shipped descriptions, in alphabetical order."""
    folder = resources.files("search_spaces.hardware")
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A shipped description by its name, or one's own by the path of a YAML file.

    Raises UsageError for an unknown name (listing the known, nearest first) and for a file with impossible figures
    (naming line, figure and remedy).
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return _validated(read(path), path.stem)
    known = list_hardware()
    found = next((k for k in known if _plain(k) == _plain(name)), None)
    if found is None:
        raise _unknown(name, known)
    file = f"{found}.yaml"
    text = resources.files("search_spaces.hardware").joinpath(file).read_text(encoding="utf-8")
    return _validated(parse(text, file), found)


def _plain(name: str) -> str:
    """``RTX 4090`` and ``rtx-4090`` mean rtx4090."""
    return "".join(c for c in name.lower() if c.isalnum())


def _unknown(name: str, known: tuple[str, ...]) -> UsageError:
    by_nearness = sorted(known, key=lambda k: -SequenceMatcher(None, _plain(name), _plain(k)).ratio())
    near = closest(name, known)
    return UsageError(
        f"there is no hardware {name!r}",
        remedy=(f"Did you mean {near}? " if near else "")
        + f"Shipped: {', '.join(by_nearness)}. Your own: the path of a YAML file; `autockpt calibrate` writes one.",
    )


def _validated(document: Document, name: str) -> Hardware:
    if not isinstance(document.data, dict):
        raise document.complain((), "this is not a hardware description", "`autockpt calibrate` writes one.")
    return document.validate(Hardware, {"name": name} | document.data)


def described_like(device_name: str, kind: str, memory_bytes: int) -> Hardware | None:
    """The shipped description of the same card, by the name a driver gives it and its memory; None where none is."""
    if kind == "cpu":
        return load_hardware("cpu")
    said = _plain(device_name)
    for name in list_hardware():
        hardware = load_hardware(name)
        alike = all(_plain(part) in said for part in name.split("-")[:1])
        near = abs(hardware.memory_bytes / memory_bytes - 1) < 0.15 if memory_bytes > 0 else False
        if hardware.kind == kind and alike and near:
            return hardware
    return None
