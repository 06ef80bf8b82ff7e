"""What a person asks of a step or a plan: explain, diagnose, verify, and a run's page."""
