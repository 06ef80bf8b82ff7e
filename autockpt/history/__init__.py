"""Runs and their trials on disk, what they say, and the statistics behind it. Numbers only."""
