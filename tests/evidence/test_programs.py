"""The programs behind ``results/`` keep working: all can be imported, and those that take seconds run."""

import ast
import importlib
import pkgutil

import pytest

import tests.evidence
import tests.gpu
from tests.evidence import mutants

PROGRAMS = [
    found.name
    for package in (tests.evidence, tests.gpu)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if ".test_" not in found.name and not (found.name.endswith("__main__") and "gpu" in found.name)
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_can_be_imported_and_says_what_it_is_for(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.slow
def test_sampled_mutants_differ_and_each_changes_its_module():
    drawn = mutants.sample("solvers", 12, seed=1)
    assert len({(mutant.module, mutant.line) for mutant in drawn}) == 12
    for mutant in drawn:
        assert ast.unparse(mutants.mutated(mutant)) != ast.unparse(ast.parse(mutant.module.read_text()))
        assert all((mutants.ROOT / path).exists() for path in mutants.tests_of(mutant.module))
