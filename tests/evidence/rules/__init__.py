"""Rules of thumb about recompute and offload, tested on a model. ``python -m tests.evidence.rules`` runs it."""
