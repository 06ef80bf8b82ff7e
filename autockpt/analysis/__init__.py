"""Questions about a step, a plan or a run, and their answers: explain, diagnose, verify, and a run's page."""
