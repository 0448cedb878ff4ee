"""The cells that `benchmarks.scale_grid --seed` draws."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.scale_cells import HOSTS, MBITS, TENSORS, WORKS, DrawnCell, drawn_cells


def cells_of(seed: int) -> list[DrawnCell]:
    return list(islice(drawn_cells(seed, cores=3, most_mbit=2000, most_s=4.0), 200))


def test_a_seed_gives_the_same_cells_again() -> None:
    assert cells_of(5) == cells_of(5)
    assert cells_of(5) != cells_of(6)


def test_cells_are_of_all_kinds_and_within_their_ranges() -> None:
    cells = cells_of(7)
    assert {cell.work for cell in cells} == set(WORKS)
    assert {cell.tensors for cell in cells} == set(TENSORS)
    assert {cell.hosts for cell in cells} == set(range(HOSTS[0], HOSTS[1] + 1))
    assert all(MBITS[0] <= cell.mbit <= MBITS[1] for cell in cells)
    assert min(cell.mbit for cell in cells) < 30 < 500 < max(cell.mbit for cell in cells)
    assert all(cell.mbit * cell.hosts <= 2000 and cell.bytes_s <= 4.0 for cell in cells)
    computing = [cell for cell in cells if cell.work == "compute"]
    assert {cell.hosts for cell in computing} == {2, 3}, "at most as many as there are cores"


@pytest.mark.parametrize(("tensors", "count"), [("even", 24), ("huge", 24), ("small", 600)])
def test_a_model_has_its_bytes_in_tensors_of_its_kind(tensors: str, count: int) -> None:
    cell = next(cell for cell in cells_of(8) if cell.tensors == tensors)
    assert len(cell.tensor_bytes) == count
    assert sum(cell.tensor_bytes) == pytest.approx(cell.model_bytes, rel=0.03)
    assert (max(cell.tensor_bytes) > cell.model_bytes / 2) == (tensors == "huge")
