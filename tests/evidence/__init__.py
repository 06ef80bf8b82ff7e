"""Programs that make what lies in ``results/``: ``python -m tests.evidence.NAME``. No part of the test suite."""
