"""A script's collectives are counted from beside it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drumline.watch.beats.phase import Phase
from drumline.watch.beats.record import Beat, BeatWriter, read_beat
from drumline.watch.rank.collective_count import CollectiveCount, collectives_begun
from tests.ranks import run_ranks


def seen(path: Path, number: int | None) -> Beat:
    """The record, once it has this number."""
    deadline = time.monotonic() + 30
    while (beat := read_beat(path)) is None or beat.collective != number:
        assert time.monotonic() < deadline, beat
        time.sleep(0.02)
    return beat


def work(folder: Path) -> tuple[list[int | None], list[Beat]]:
    path = folder / f"{time.monotonic_ns()}.beat"
    count = CollectiveCount(BeatWriter(path), every_s=0.02)
    numbers, beats = [collectives_begun()], []
    dist.init_process_group("gloo")
    for _ in range(2):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        numbers.append(collectives_begun())
        beats.append(seen(path, numbers[-1]))
    time.sleep(0.2)
    beats.append(seen(path, numbers[-1]))
    dist.destroy_process_group()
    numbers.append(collectives_begun())
    count.close()
    return numbers, beats


def test_the_number_moves_with_the_script_and_stands_with_it(tmp_path: Path) -> None:
    results = run_ranks(2, work, tmp_path)
    for (before, first, after, gone), beats in results:
        assert (before, gone) == (None, None)
        assert after - first == 3
        assert {beat.phase for beat in beats} == {Phase.USER}
        assert beats[0].beats < beats[1].beats == beats[2].beats, "a look that finds nothing new is no beat"
    assert results[0][0] == results[1][0], "the same collective has the same number everywhere"


def test_without_torch_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert collectives_begun() is None
    assert "torch.distributed" not in sys.modules
