"""A few faults of the matrix on real hosts: the right host, rank and cause, nothing lost, the right
bits.

`make soak-faults` runs all of them, many times, and beside plain torchrun.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multinode import needs
from tests.multinode.faults.catalogue import FAULTS, make_cases, make_chain
from tests.multinode.faults.matrix import Matrix
from tests.multinode.faults.report import is_fine, report

# What is certain at once, what is only suspected, and what no rank is left to tell: one run suffers
# them in turn, as starting ranks is what takes time.
CHAIN = ("stopped", "dataset", "host_gone")


@pytest.mark.skipif(needs.missing() is not None, reason=needs.missing() or "")
def test_faults_are_reported_and_survived(tmp_path: Path) -> None:
    with Matrix(tmp_path / "matrix", hang_s=5.0, warm=True) as matrix:
        results = matrix.run_chain(make_chain(CHAIN, 1))
    for result in results:
        assert is_fine(result), report(result)
        (first, *_) = result.said
        assert str(first["message"]).startswith(f"{first['word']}: "), report(result)
        assert ". Try: " in str(first["message"]), report(result)
        assert any(str(first["message"]) in line for line in result.screen), report(result)


def test_cases_are_decided_by_their_seed_and_every_fault_has_its_turn() -> None:
    cases = make_cases(2 * len(FAULTS), 5)
    assert cases == make_cases(2 * len(FAULTS), 5)
    assert [case.name for case in cases] == [*FAULTS, *FAULTS]
    assert {case.seed for case in cases} == {5, 6}
    assert all(case.rank in case.fault.ranks for case in cases)


def test_no_fault_is_left_out_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    for fault in FAULTS.values():
        for cause in fault.causes:
            assert f"`{cause}`" in page, cause
