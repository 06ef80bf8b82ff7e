"""Applying choices to a live model, and taking them off again."""

from autockpt.checkpointing.divergence import DivergenceCheck
from autockpt.policies.base import Session, attached_path, remove
from autockpt.runtime.apply import Handle, apply, choices_for, plan_of
from autockpt.runtime.session import attach, without_kv_cache
