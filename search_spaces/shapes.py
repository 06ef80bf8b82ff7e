"""Model shapes shipped with autockpt: configurations by name, without weights."""

from __future__ import annotations

from importlib import resources
from typing import Any

from pydantic import Field

from autockpt.errors import UsageError
from autockpt.schema.base import Data
from autockpt.schema.suggest import closest
from autockpt.schema.workload import Dtype, OptimizerName
from autockpt.schema.yaml import parse


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
    folder = resources.files("search_spaces.models")
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_model_shape(name: str) -> ModelShape:
    """The shipped shape of this name. Raises UsageError for an unknown one, suggesting the nearest."""
    known = list_models()
    if name not in known:
        near = closest(name, known)
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(f"there is no model shape {name!r}", remedy=f"{hint}Shipped: {', '.join(known)}.")
    file = f"{name}.yaml"
    document = parse(resources.files("search_spaces.models").joinpath(file).read_text(encoding="utf-8"), file)
    return document.validate(ModelShape, {"name": name} | document.data)
