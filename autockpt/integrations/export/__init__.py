"""A plan as the nearest setting of a trainer that has activation checkpointing of its own, and what is lost."""

from autockpt.integrations.export.targets import TARGETS, export
from autockpt.integrations.export.wanted import Exported

__all__ = ["TARGETS", "Exported", "export"]
