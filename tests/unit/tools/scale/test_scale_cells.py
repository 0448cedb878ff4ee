"""The cells that `benchmarks.scale_grid --seed` draws and measures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest

from benchmarks import scale_drawn
from benchmarks.scale_cells import HOSTS, MBITS, MOST_MBIT, TENSORS, WORKS, DrawnCell, drawn_cells
from benchmarks.scale_ranks import RanksError


def cells_of(seed: int) -> list[DrawnCell]:
    return list(islice(drawn_cells(seed, cores=3, most_s=4.0), 200))


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
    assert all(cell.mbit * cell.hosts <= MOST_MBIT and cell.bytes_s <= 4.0 for cell in cells)
    computing = [cell for cell in cells if cell.work == "compute"]
    assert {cell.hosts for cell in computing} == {2}, "each has a core for gloo's threads, too"
    many_cores = islice(drawn_cells(7, cores=16, most_s=4.0), 200)
    assert {cell.hosts for cell in many_cores if cell.work == "compute"} == set(range(2, 9))
    assert (
        max(cell.model_bytes / cell.compute_s for cell in computing if cell.compute_s > 0.2) < 8.1e6
    )
    small = [cell for cell in cells if cell.tensors == "small" and cell.work != "compute"]
    busy = [cell.hosts * 0.05 / (3 * (cell.compute_s + 0.05)) for cell in small]
    assert max(busy) <= 0.5, "600 tensors take CPU time on each host"
    assert max(cell.hosts for cell in small) == HOSTS[1]


@pytest.mark.parametrize(("tensors", "count"), [("even", 24), ("huge", 24), ("small", 600)])
def test_a_model_has_its_bytes_in_tensors_of_its_kind(tensors: str, count: int) -> None:
    cell = next(cell for cell in cells_of(8) if cell.tensors == tensors)
    assert len(cell.tensor_bytes) == count
    assert sum(cell.tensor_bytes) == pytest.approx(cell.model_bytes, rel=0.03)
    assert (max(cell.tensor_bytes) > cell.model_bytes / 2) == (tensors == "huge")


@pytest.mark.parametrize(
    ("halves", "attempts", "chosen"),
    [
        ([(1.0, 1.03)], 1, 0),
        ([(1.0, 1.2), (1.0, 1.01)], 2, 1),
        ([(1.0, 1.2), (1.1, 1.0), (1.0, 1.3)], 3, 1),
    ],
    ids=["steady", "steady in the second attempt", "never steady"],
)
def test_a_cell_is_measured_again_on_an_unsteady_machine(
    monkeypatch: pytest.MonkeyPatch,
    halves: list[tuple[float, float]],
    attempts: int,
    chosen: int,
) -> None:
    measured = iter([{"halves_s": pair, "measured_s": sum(pair) / 2} for pair in halves])
    monkeypatch.setattr(scale_drawn, "_measured", lambda cell, ranks: next(measured))
    row = scale_drawn.measured_row(cells_of(5)[0], None)  # type: ignore[arg-type]
    assert row["attempts"] == attempts
    assert row["halves_s"] == halves[chosen]


def test_after_a_cell_that_fails_the_others_are_measured_on_new_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = argparse.Namespace(seed=5, cells=3, hosts=8, most_s=None, minutes=math.inf, nice=0)
    starts: list[int] = []

    @contextmanager
    def started_ranks(num_hosts: int, *, nice: int) -> Iterator[int]:
        starts.append(num_hosts)
        yield len(starts)

    def measured(cell: DrawnCell, start: int) -> dict[str, Any]:
        if start == 1:
            raise RanksError("Traceback:\nRuntimeError: no route to host\n")
        result = {
            "measured_s": 0.5,
            "halves_s": (0.5, 0.5),
            "cpu_wait_part": 0.01,
            "predicted_s": 0.51,
        }
        return {**result, "interval_s": [0.4, 0.6], "error": 0.02, "is_within": True}

    monkeypatch.setattr(scale_drawn, "started_ranks", started_ranks)
    monkeypatch.setattr(scale_drawn, "_measured", measured)
    rows = list(scale_drawn.measured_rows(options))
    assert starts == [8, 8]
    lines = [scale_drawn.drawn_line(row) for row in rows]
    assert lines[0].endswith("| | | failed: RuntimeError: no route to host | |")
    assert all(line.endswith("| 1% | 500 | 510 | 400 - 600 | +2.0% |") for line in lines[1:])
    assert scale_drawn.drawn_summary(rows) == (
        "2 cells: mean error 2.0%, worst 2.0%; 2 (100%) inside of their intervals; 0 refused, 1 failed, "
        "0 on an unsteady machine in all attempts"
    )


def test_no_cell_is_started_after_the_minutes_are_over(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(seed=5, cells=3, hosts=8, most_s=None, minutes=0.0, nice=0)
    assert list(scale_drawn.measured_rows(options)) == []
    assert "no time for 3 cells" in capsys.readouterr().err
