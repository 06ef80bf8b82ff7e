"""The search: seeds from solvers, candidates from Optuna, real steps, one plan."""

from autockpt.tuning.search import run_search, search

__all__ = ["run_search", "search"]
