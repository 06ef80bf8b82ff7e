"""Data shipped with autockpt: model shapes and search spaces."""

from search_spaces.shapes import ModelShape, ShapeDefaults, list_models, load_model_shape

__all__ = ["ModelShape", "ShapeDefaults", "list_models", "load_model_shape"]
