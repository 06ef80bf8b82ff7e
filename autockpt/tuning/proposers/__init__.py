"""Where candidates come from: an exact solver steered by Optuna, or splits of the layers for compiled steps."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress


def _import_optuna() -> None:
    """And its optimizer of acquisition functions, which it would import when a Gaussian process first proposes."""
    for name in ("optuna", "optuna._gp.batched_lbfgsb"):
        with suppress(ImportError):  # whoever needs it says what is missing
            importlib.import_module(name)


# Optuna keeps the exceptions of optional imports that failed, and they the frames of everybody who was calling: a model
# would never be freed after `autockpt.search`. Nobody calls a thread.
_thread = threading.Thread(target=_import_optuna)
_thread.start()
_thread.join()
