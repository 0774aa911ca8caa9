"""The list of mutants is of the sources and tests as they are; running them takes long and is no part of the suite."""

import ast
from functools import cache
from pathlib import Path

import pytest
from run_mutants import ROOT, load_mutants

MUTANTS = load_mutants()
NEEDS_MORE = ("tests/integrations/", "tests/traces/test_spark.py", "tests/models/test_smollm2.py")
"""Tests that need an extra."""


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.fault}")
def test_a_mutant_can_be_planted_and_its_tests_exist(mutant):
    source = (ROOT / mutant.place).read_text()
    planted = mutant.planted(source)
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(ROOT / file)
        assert not file.startswith(NEEDS_MORE) and "browser" not in file


def test_the_list_covers_every_package_that_computes():
    """Not those that load models, draw, or join the others, which whole runs test."""
    computing = {"classes", "config", "display", "evaluation", "gradients", "inference", "knockout", "models"}
    computing |= {"policies", "replay", "report", "rocks", "rollouts", "run_dir", "scoring", "studies", "tasks"}
    computing |= {"traces", "training", "windows"}
    assert computing <= {mutant.package for mutant in MUTANTS}
    assert len(MUTANTS) >= 100 and len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
