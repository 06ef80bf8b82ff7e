"""The programs behind ``results/`` keep working: all can be imported, and say what they are for."""

import importlib
import pkgutil

import pytest

import tests.evidence
import tests.gpu

PROGRAMS = [
    found.name
    for package in (tests.evidence, tests.gpu)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if ".test_" not in found.name and not (found.name.endswith("__main__") and "gpu" in found.name)
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_can_be_imported_and_says_what_it_is_for(name):
    assert importlib.import_module(name).__doc__
