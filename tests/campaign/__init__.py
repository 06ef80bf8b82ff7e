"""Odd models and odd training loops, drawn by number: plain training against plans, bit for bit.

``python -m tests.campaign --help``. A sample with fixed numbers runs with the other tests.
"""
