"""A model for whole searches, which take about as long as it has layers."""

from pathlib import Path

TWO_LAYERS = str(Path(__file__).with_name("two_layers"))
"""llama-tiny with two layers instead of four: the folder of its config.json."""
