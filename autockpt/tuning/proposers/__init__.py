"""What a search tries next: the exact solver's plans steered by Optuna, or split plans for compiled steps."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress


def _import_optuna() -> None:
    """Import optuna and the part of its Gaussian process that it would import at the first proposal."""
    with suppress(ImportError):  # the module that needs it raises
        optuna = importlib.import_module("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of optional packages
        importlib.import_module("optuna._gp.batched_lbfgsb")


# Optuna keeps the exceptions of optional imports that failed, and these keep the frames of all callers: a model would
# never be freed after `autockpt.search`. A thread has no callers.
_thread = threading.Thread(target=_import_optuna)
_thread.start()
_thread.join()
