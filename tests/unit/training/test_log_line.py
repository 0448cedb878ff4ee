"""What a run that waits for data is told: when, and what."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.data.loader import IndexedLoader
from drumline.metrics.display import PlainDisplay
from drumline.training import loop
from drumline.training.loop import LogTraining, data_advice


@pytest.mark.parametrize(
    ("cores", "workers", "is_stream", "share", "expected"),
    [
        (16, 0, False, 0.75, "--data.workers 3"),
        (16, 0, False, 0.2, "--data.workers 1"),
        (2, 0, False, 1.0, "--data.workers 1"),
        (16, 4, False, 0.5, "--data.workers 8"),
        (16, 14, False, 0.94, None),  # 15 instead of 14 are no advice
        (16, 0, True, 0.9, "--data.workers 1"),
        (16, 1, True, 0.9, None),
    ],
)
def test_as_many_workers_as_would_keep_up_and_no_more_than_cores(
    cores: int, workers: int, is_stream: bool, share: float, expected: str | None
) -> None:
    measured, *remedies = data_advice(workers, cores, share, is_stream=is_stream).split("\n  - ")
    assert measured.startswith(f"{workers} worker")
    assert len(remedies) == 2 + (expected is not None)
    assert expected is None or remedies[0] == expected


class Laps:
    """A run that only logs, and keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.throughput = SimpleNamespace(lap_s=4.0)
        ddp = SimpleNamespace(local_world_size=2, host="gpu-01", is_main_process=lambda: True)
        loader = IndexedLoader.__new__(IndexedLoader)
        loader.waited_s = 0.0
        self.job = SimpleNamespace(loader=loader, ddp=ddp, batch=SimpleNamespace(size=1))
        self.config: Any = SimpleNamespace(
            log=SimpleNamespace(every_steps=1), data=SimpleNamespace(workers=0)
        )
        self.progress = SimpleNamespace(step=0)
        self.note = self.notes.append
        context: Any = self
        anything: Any = None
        self.line = LogTraining(context, anything, anything)

    def add(self, share: float, *, steps_left: float = 0.0) -> int:
        """An interval of 4 s; the number of notes so far."""
        self.job.loader.waited_s += 4.0 * share
        context: Any = self
        speed: Any = SimpleNamespace(samples_per_s=1.0)
        self.line._advise(context, speed, steps_left)
        return len(self.notes)


def test_it_is_given_once_when_the_share_stays_high(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "usable_cpus", lambda: 6.5)  # a container's quota
    run = Laps()
    assert [run.add(share) for share in (0.9, 0.5, 0.5, 0.8, 0.9, 0.9)] == [0, 0, 0, 1, 1, 1]
    PlainDisplay(sys.stdout)({"kind": "note", "time": 0.0, "step": 30, "message": run.notes[0]})
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith(
        "rank 0 on gpu-01 waited for data 60% of the last 12 s; it has 0 workers and 3 cores; try:"
    )
    assert second == "  - --data.workers 2"


def test_the_first_interval_and_a_short_wait_do_not_count() -> None:
    run = Laps()
    shares = (0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9)
    assert [run.add(share) for share in shares] == [0, 0, 0, 0, 0, 0, 1]


def test_a_device_that_has_work_left_is_not_idle() -> None:
    run = Laps()
    assert [run.add(0.9, steps_left=2.0) for _ in range(6)] == [0] * 6
    assert [run.add(0.9, steps_left=1.0) for _ in range(3)] == [0, 0, 1]
