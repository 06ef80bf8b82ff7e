"""Holding a plan against its promises with real steps."""

from autockpt.verification.run import verify
