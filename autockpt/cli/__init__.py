"""The command line: one file per verb. Nothing heavy is imported before a verb runs."""

from autockpt.cli.app import main
