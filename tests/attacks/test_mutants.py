"""The mutants of `make soak-mutants` fit the code: a change of the code changes them too."""

from __future__ import annotations

import pytest

from tests.attacks.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_what_a_mutant_changes_is_there_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.code) == 1
