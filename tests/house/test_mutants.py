"""The mutants still fit the package: each text stands once where the mutant says."""

from __future__ import annotations

import mutants
import pytest
from support.programs import ROOT


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_changes_one_place_and_its_tests_are_there(name: str) -> None:
    mutant = mutants.MUTANTS[name]
    file, text = mutants.mutated(mutant)
    compile(text, str(file), "exec")
    assert text != file.read_text()
    assert all((ROOT / test).exists() for test in mutants.tests_of(name))


def test_there_are_many_mutants() -> None:
    assert len(mutants.MUTANTS) >= 60
