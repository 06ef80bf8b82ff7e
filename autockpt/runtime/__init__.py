"""Applying choices to a live model, and taking them off again."""

from autockpt.runtime.apply import Handle, apply, choices_for
from autockpt.runtime.check_report import Proof
from autockpt.runtime.session import Session, attach, attached_path, remove, without_kv_cache
