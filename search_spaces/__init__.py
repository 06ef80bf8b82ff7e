"""Data shipped with autockpt: hardware descriptions, model shapes and search spaces."""

from search_spaces.hardware import list_hardware, load_hardware
from search_spaces.shapes import ModelShape, ShapeDefaults, list_models, load_model_shape

__all__ = ["ModelShape", "ShapeDefaults", "list_hardware", "list_models", "load_hardware", "load_model_shape"]
