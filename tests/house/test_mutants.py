"""The mutants still fit the package: each text stands once where the mutant says."""

from __future__ import annotations

import mutants
import pytest
from support.programs import ROOT


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_its_tests_are_there(mutant: mutants.Mutant) -> None:
    file, text = mutants.mutated(mutant)
    compile(text, str(file), "exec")
    assert text != file.read_text() and mutant.promise
    assert mutant.tests and all((ROOT / name.partition("::")[0]).exists() for name in mutant.tests)


def test_there_are_many_mutants_of_different_names() -> None:
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 60
