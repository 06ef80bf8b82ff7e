"""Where candidates come from: an exact solver steered by Optuna, or splits of the layers for compiled steps."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress


def _import_optuna() -> None:
    """And its optimizer of acquisition functions, which it would import when a Gaussian process first proposes."""
    with suppress(ImportError):  # whoever needs it says what is missing
        optuna = importlib.import_module("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns of packages that nobody needs
        importlib.import_module("optuna._gp.batched_lbfgsb")


# Optuna keeps the exceptions of optional imports that failed, and they the frames of everybody who was calling: a model
# would never be freed after `autockpt.search`. Nobody calls a thread.
_thread = threading.Thread(target=_import_optuna)
_thread.start()
_thread.join()
