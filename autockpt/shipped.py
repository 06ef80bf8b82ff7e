"""What ships with autockpt as YAML files: descriptions of hardware, model shapes and search spaces.

They lie in ``search_spaces/`` of a checkout, and travel inside of the installed package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data, closest
from autockpt.schema.hardware import Hardware
from autockpt.schema.space import SPACE_VERSION, SearchSpace
from autockpt.schema.workload import Dtype, OptimizerName
from autockpt.schema.yaml import Document, read

_PACKAGE = Path(__file__).parent
FOLDER = next(path for path in (_PACKAGE / "search_spaces", _PACKAGE.parent / "search_spaces") if path.is_dir())
"""With the folders ``hardware``, ``models`` and ``spaces``."""


class ShapeDefaults(Data):
    """The training step that stands for a shape where the user says nothing else. ``seq_len`` is None for images."""

    dtype: Dtype = "fp32"
    batch_size: int = Field(gt=0)
    seq_len: int | None = Field(default=None, gt=0)
    optimizer: OptimizerName = "adamw"


class ModelShape(Data):
    """A model by its configuration: ``config`` are arguments of transformers' configuration class of ``model_type``."""

    name: str
    description: str
    model_type: str
    architecture: str | None = Field(default=None, description="model class; None: chosen by the model type")
    config: dict[str, Any]
    params: int = Field(gt=0, description="number of parameters of the whole model, head included")
    hub_id: str | None = Field(default=None, description="where weights of this shape can be had")
    source: str = Field(description="where the figures are from")
    defaults: ShapeDefaults


def list_models() -> tuple[str, ...]:
    """Names of all shipped shapes, in alphabetical order."""
    return _names("models")


def load_model_shape(name: str) -> ModelShape:
    """The shipped shape of this name. Raises UsageError for an unknown one, suggesting the nearest."""
    known = list_models()
    if name not in known:
        raise _unknown("model shape", name, known)
    document = read(FOLDER / "models" / f"{name}.yaml")
    return document.validate(ModelShape, {"name": name} | document.data)


def list_hardware() -> tuple[str, ...]:
    """Names of all shipped descriptions, in alphabetical order."""
    return _names("hardware")


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A shipped description by its name, or one's own by the path of a YAML file.

    Raises UsageError for an unknown name (listing the known) and for a file with impossible figures
    (naming line, figure and remedy).
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        return _hardware(read(path), path.stem)
    known = list_hardware()
    found = next((k for k in known if _plain(k) == _plain(name)), None)
    if found is None:
        own = " Your own: the path of a YAML file; `autockpt calibrate` writes one."
        raise _unknown("hardware", name, known, own)
    return _hardware(read(FOLDER / "hardware" / f"{found}.yaml"), found)


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


def list_spaces() -> tuple[str, ...]:
    """Names of all shipped search spaces, in alphabetical order."""
    return _names("spaces")


def load_space(name: str) -> SearchSpace:
    """A shipped search space by its name, or one's own by the path of a YAML file.

    Raises UsageError for an unknown name or a malformed file, naming the line.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return _space(read(path), path.stem)
    known = list_spaces()
    if name not in known:
        raise _unknown("search space", name, known, " Your own: the path of a YAML file.")
    return _space(read(FOLDER / "spaces" / f"{name}.yaml"), name)


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (FOLDER / folder).glob("*.yaml")))


def _unknown(what: str, name: str, known: tuple[str, ...], more: str = "") -> UsageError:
    near = closest(name, known)
    hint = f"Did you mean {near}? " if near else ""
    return UsageError(f"there is no {what} {name!r}", remedy=f"{hint}Shipped: {', '.join(known)}.{more}")


def _plain(name: str) -> str:
    """``RTX 4090`` and ``rtx-4090`` mean rtx4090."""
    return "".join(c for c in name.lower() if c.isalnum())


def _hardware(document: Document, name: str) -> Hardware:
    if not isinstance(document.data, dict):
        raise document.complain((), "this is not a hardware description", "`autockpt calibrate` writes one.")
    return document.validate(Hardware, {"name": name} | document.data)


def _space(document: Document, name: str) -> SearchSpace:
    if not isinstance(document.data, dict) or "search_space" not in document.data:
        raise document.complain((), "this is not a search space", f"It must say `search_space: {SPACE_VERSION}`.")
    return document.validate(SearchSpace, {"name": name} | document.data)
