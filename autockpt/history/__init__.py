"""Trials to answers: the best plan, the Pareto front, comparisons, and the statistics behind them. Numbers only."""

from autockpt.history.trials import (
    SORT_KEYS,
    ComparisonRow,
    best,
    comparison,
    distinct,
    duplicates,
    overhead,
    pareto_front,
    ranked,
)

__all__ = [
    "SORT_KEYS",
    "ComparisonRow",
    "best",
    "comparison",
    "distinct",
    "duplicates",
    "overhead",
    "pareto_front",
    "ranked",
]
