"""What a run that waits for data is told: when, and what."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.data.dataset import BatchMaker
from drumline.data.images import digits
from drumline.data.loader import IndexedLoader
from drumline.data.sharding import Sharding
from drumline.data.workers import LoadingOptions, WorkerTimes
from drumline.metrics.display import PlainDisplay
from drumline.training.between_steps import log_line
from drumline.training.between_steps.log_line import DataAdvice, LoadingFacts, _load, _sizes, advice
from tests.jobs import Points

CHEAPER = (
    "of images return uint8 (now 602 kB of float32), and do the rest for the whole batch in on_device(): docs/data.md, "
    '"Your own dataset, fast"'
)
STORED = "store the samples so that they take less time to read: decoded and resized"
UNEVEN = "a larger --data.prefetch_factor: workers are idle while a batch is late"


@pytest.mark.parametrize(
    ("facts", "share", "expected"),
    [
        # As many workers as would keep up; no more than there are cores, but where they wait for
        # storage.
        (LoadingFacts(cores=16, workers=0), 0.75, ["--data.workers 3", STORED]),
        (LoadingFacts(cores=16, workers=0), 0.2, ["--data.workers 1", STORED]),
        (LoadingFacts(cores=2, workers=0), 1.0, ["--data.workers 1", STORED]),
        (LoadingFacts(cores=16, workers=4, worker_load=0.97), 0.5, ["--data.workers 8", STORED]),
        (LoadingFacts(cores=4, workers=3, worker_load=0.03), 0.9, ["--data.workers 12", UNEVEN]),
        (LoadingFacts(cores=4, workers=12, worker_load=0.03), 0.9, [UNEVEN, STORED]),
        # Where no number of workers is enough, cheaper samples come first; 15 workers instead of 14
        # are no advice.
        (
            LoadingFacts(cores=16, workers=0, float_sample="602 kB of float32"),
            0.5,
            ["--data.workers 1", CHEAPER],
        ),
        (
            LoadingFacts(cores=16, workers=0, float_sample="602 kB of float32"),
            0.99,
            [CHEAPER, "--data.workers 15"],
        ),
        (
            LoadingFacts(cores=16, workers=14, worker_load=1.0, float_sample="602 kB of float32"),
            0.94,
            [CHEAPER, STORED],
        ),
        (
            LoadingFacts(cores=16, workers=0, fits="1.2 GB"),
            0.5,
            [
                "--data.resident: the 1.2 GB of this dataset fit into the GPU's memory",
                "--data.workers 1",
            ],
        ),
        (
            LoadingFacts(cores=8, workers=4, worker_load=0.8, restarts_for_epochs=True),
            0.4,
            [
                "leave --no-data.persistent_workers out: workers are started again for every epoch",
                "--data.workers 7",
            ],
        ),
        (LoadingFacts(cores=16, workers=0, is_stream=True), 0.9, ["--data.workers 1", STORED]),
        (LoadingFacts(cores=16, workers=1, worker_load=0.9, is_stream=True), 0.9, [STORED]),
    ],
)
def test_the_most_useful_one_or_two_come_first(
    facts: LoadingFacts, share: float, expected: list[str]
) -> None:
    _, *remedies = advice(facts, share=share, seconds=12.3).split("\n  - ")
    assert remedies == expected


def test_it_begins_with_what_was_measured() -> None:
    facts = LoadingFacts(cores=16, workers=14, worker_load=0.97)
    assert advice(facts, share=0.94, seconds=12.3).startswith(
        "waited for data 94% of the last 12 s; it has 14 workers (each uses 97% of a core) and 16 cores; try:\n  - "
    )
    assert "it has 0 workers and 1 core; try:\n" in advice(
        LoadingFacts(cores=1, workers=0), share=0.94, seconds=12.3
    )


def test_the_load_is_that_of_the_interval() -> None:
    slept = WorkerTimes((7, 8), 10.0, 200.0)
    worked = WorkerTimes((7, 8), 28.0, 220.0)
    assert _load(slept, worked) == pytest.approx(0.9)
    assert _load(slept, worked._replace(pids=(7, 9))) is None, "one was started in between"
    assert _load(None, worked) is None


class Laps:
    """A run that only logs, and keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.throughput = SimpleNamespace(seconds=0.0)
        sharding = Sharding(batch_size=4, rank=0, world_size=1)
        options = LoadingOptions()
        loader = IndexedLoader(
            Points(8), sharding=sharding, device=torch.device("cpu"), seed=0, options=options
        )
        ddp = SimpleNamespace(device=torch.device("cpu"), local_world_size=2, host="gpu-01")
        self.job = SimpleNamespace(loader=loader, ddp=ddp)
        data = SimpleNamespace(resident=False, persistent_workers=True)
        self.config = SimpleNamespace(data=data)
        self.epoch = 1
        self.note = self.notes.append
        self.given: DataAdvice | None = None

    def add(self, share: float, *, steps_left: float = 0.0) -> int:
        """An interval of 4 s; the number of notes so far."""
        self.throughput.seconds += 4.0
        self.job.loader.waited_s += 4.0 * share
        context: Any = self
        if self.given is None:
            self.given = DataAdvice(context)
        else:
            self.given.check(context, share, steps_left)
        return len(self.notes)


def test_it_is_given_once_when_the_share_stays_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_line, "usable_cpus", lambda: 6.5)  # a container's quota
    run = Laps()
    assert [run.add(share) for share in (0.9, 0.5, 0.5, 0.8, 0.9, 0.9)] == [0, 0, 0, 1, 1, 1]
    first, second, *_ = run.notes[0].splitlines()
    assert (
        first
        == "rank 0 on gpu-01 waited for data 60% of the last 12 s; it has 0 workers and 3 cores; try:"
    )
    assert second == "  - --data.workers 2"


def test_the_first_interval_and_a_short_wait_do_not_count() -> None:
    run = Laps()
    assert [run.add(share) for share in (0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9)] == [
        0,
        0,
        0,
        0,
        0,
        0,
        1,
    ]


def test_a_device_that_has_work_left_is_not_idle() -> None:
    run = Laps()
    assert [run.add(0.9, steps_left=2.0) for _ in range(6)] == [0] * 6
    assert [run.add(0.9, steps_left=1.0) for _ in range(3)] == [0, 0, 1]


def test_what_is_read_from_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Points):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(3, 224, 224), 1

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 0))
    gpu = torch.device("cuda", 0)
    small = Points(8)
    bytes_ = digits(split="train", augment=True)
    assert _sizes(BatchMaker(Large(8), seed=0), gpu) == (None, "602 kB of float32")
    assert _sizes(BatchMaker(small, seed=0), gpu) == (None, None)
    assert _sizes(BatchMaker(bytes_, seed=0, defer_finish=True), gpu) == (None, None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 0))
    assert _sizes(BatchMaker(bytes_, seed=0, defer_finish=True), gpu) == ("115 kB", None)


def test_each_thing_to_try_has_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    message = "rank 0 on a " + advice(LoadingFacts(cores=16, workers=0), share=0.75, seconds=12.3)
    PlainDisplay(sys.stdout)({"kind": "note", "time": 0.0, "step": 30, "message": message})
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["  - --data.workers 3", f"  - {STORED}"]
