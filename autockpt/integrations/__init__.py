"""One thin adapter per trainer. Each imports its trainer, so each is imported by its own name only:

``integrations.transformers`` (Trainer, TRL), ``integrations.lightning``, ``integrations.export`` (settings of trainers
that have activation checkpointing of their own). accelerate needs none: ``autockpt.apply`` does, before or after
``prepare``.
"""
