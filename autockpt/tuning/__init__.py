"""The search: seeds from solvers, candidates from Optuna, real steps, one plan."""

from autockpt.tuning.entry import answer, search_request
from autockpt.tuning.estimates import estimate
from autockpt.tuning.search import run_search
