"""Where candidates come from: an exact solver steered by Optuna, or splits of the layers for compiled steps."""
