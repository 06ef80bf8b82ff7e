"""A plan as the nearest setting of a trainer that has activation checkpointing of its own, and what is lost."""

from autockpt.integrations.export.trainers import TARGETS, export

__all__ = ["TARGETS", "export"]
