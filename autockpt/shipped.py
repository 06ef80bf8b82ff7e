"""Hardware descriptions and model shapes that ship with autockpt as YAML files.

They lie in ``search_spaces/`` of a checkout, and travel inside of the installed package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data, did_you_mean
from autockpt.schema.hardware import Hardware
from autockpt.schema.workload import Dtype, OptimizerName
from autockpt.schema.yaml import Document, read

_PACKAGE = Path(__file__).parent
FOLDER = next(path for path in (_PACKAGE / "search_spaces", _PACKAGE.parent / "search_spaces") if path.is_dir())
"""With the folders ``hardware`` and ``models``."""


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
    source: str = Field(description="where the figures are from")
    defaults: ShapeDefaults


def list_models() -> tuple[str, ...]:
    """Names of all shipped shapes, in alphabetical order."""
    return _names("models")


def list_hardware() -> tuple[str, ...]:
    """Names of all shipped descriptions, in alphabetical order."""
    return _names("hardware")


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (FOLDER / folder).glob("*.yaml")))


def load_model_shape(name: str) -> ModelShape:
    """The shipped shape of this name. Raises UsageError for an unknown one, suggesting the nearest."""
    return _shipped("models", name, "model shape").validate(ModelShape, name=name)


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A shipped description by its name, or one's own by the path of a YAML file.

    Raises UsageError for an unknown name (listing the known) and for a file with impossible figures
    (naming line, figure and remedy).
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.is_file():
        document, name = read(path), path.stem
    else:
        own = " Your own: the path of a YAML file; `autockpt calibrate` writes one."
        document = _shipped("hardware", name, "hardware", own)
    return document.validate(Hardware, name=name)


def _shipped(folder: str, name: str, what: str, own: str = "") -> Document:
    """A file that ships with autockpt. Raises UsageError for a name of none, suggesting the nearest."""
    known = _names(folder)
    if name not in known:
        remedy = f"{did_you_mean(name, known)}Shipped: {', '.join(known)}.{own}"
        raise UsageError(f"there is no {what} {name!r}", remedy=remedy)
    return read(FOLDER / folder / f"{name}.yaml")
