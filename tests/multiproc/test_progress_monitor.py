"""The progress of a rank that marks no phases is seen by its collectives, or by its parameters."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drumline.rank.watched.progress_monitor import (
    AFTER_PATIENCE_S,
    ProgressMonitor,
    num_collectives,
)
from drumline.watch.heartbeat import Heartbeat, HeartbeatWriter, Phase, read_heartbeat
from tests.ranks import run_ranks


def seen(path: Path, number: int | None) -> Heartbeat:
    """The record, once it has this number."""
    deadline = time.monotonic() + 30
    while (beat := read_heartbeat(path)) is None or beat.collective != number:
        assert time.monotonic() < deadline, beat
        time.sleep(0.02)
    return beat


def timeout_s() -> float:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def work(folder: Path) -> tuple[list[int | None], list[Heartbeat]]:
    path = folder / f"{time.monotonic_ns()}.heartbeat"
    count = ProgressMonitor(HeartbeatWriter(path), patience_s=4000.0, every_s=0.02)
    numbers = [num_collectives()]
    beats = []
    dist.init_process_group("gloo")
    for _ in range(2):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        numbers.append(num_collectives())
        beats.append(seen(path, numbers[-1]))
    time.sleep(0.2)
    beats.append(seen(path, numbers[-1]))
    assert timeout_s() == 4000.0 + AFTER_PATIENCE_S, "torch's own comes after the watchdog"
    dist.destroy_process_group()
    numbers.append(num_collectives())
    count.close()
    return numbers, beats


def test_the_number_moves_with_the_script_and_stands_with_it(tmp_path: Path) -> None:
    results = run_ranks(2, work, tmp_path)
    for (before, first, after, gone), beats in results:
        assert (before, gone) == (None, None)
        assert after - first == 3
        assert {beat.phase for beat in beats} == {Phase.USER}
        assert beats[0].num_moves < beats[1].num_moves == beats[2].num_moves, (
            "a look that finds nothing new is no move"
        )
        assert beats[1].moved_at == beats[2].moved_at > beats[0].moved_at > 0
    assert results[0][0] == results[1][0], "the same collective has the same number everywhere"


def test_where_phases_are_marked_collectives_are_no_moves(tmp_path: Path) -> None:
    """They would be seen up to a second late, and hold up what is said of a hang."""
    beat = HeartbeatWriter(tmp_path / "heartbeat")
    signs = iter(range(10**9))

    def sign() -> int:
        beat.mark(Phase.BACKWARD)
        return next(signs)

    count = ProgressMonitor(beat, sign=sign, every_s=0.005)
    while beat.num_marks < 10:
        time.sleep(0.01)
    count.close()
    heartbeat = read_heartbeat(tmp_path / "heartbeat")
    assert heartbeat is not None
    assert (heartbeat.num_moves, heartbeat.phase) == (0, Phase.BACKWARD)


def test_a_look_that_fails_is_no_sign_and_not_the_last(tmp_path: Path) -> None:
    """The main thread may be building the very module whose parameters are looked at."""
    path = tmp_path / "heartbeat"
    looks = iter(range(10**9))

    def sign() -> int:
        look = next(looks)
        if look % 2:
            raise RuntimeError("dictionary changed size during iteration")
        return look

    count = ProgressMonitor(
        HeartbeatWriter(path), sign=sign, also=lambda: {}["gone"], every_s=0.005
    )
    deadline = time.monotonic() + 30
    while (beat := read_heartbeat(path)) is None or beat.num_moves < 3:
        assert time.monotonic() < deadline, beat
        time.sleep(0.01)
    count.close()
    assert beat.num_moves <= next(looks) / 2 + 1, "a look that fails is no move"


def test_without_torch_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert num_collectives() is None
    assert "torch.distributed" not in sys.modules
