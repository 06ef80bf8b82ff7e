"""Applying choices to a live model, and taking them off again."""

from autockpt.policies.base import Session
from autockpt.policies.check_report import Proof
from autockpt.runtime.apply import Handle, apply, choices_for
from autockpt.runtime.session import attach, attached_path, remove, without_kv_cache
