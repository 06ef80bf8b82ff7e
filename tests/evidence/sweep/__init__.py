"""Every architecture that the installed transformers builds from a small config, under random plans.

``python -m tests.evidence.sweep`` runs it (tens of minutes); it is no part of the test suite.
"""
