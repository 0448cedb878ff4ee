"""Worker processes: they end with their stream whatever they are doing, and not before."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import _utils

from drumline.base.errors import TrainingError
from drumline.data.dataset import BatchMaker, BatchRequest
from drumline.data.delivery import BatchProducer, LoadingOptions

pytestmark = [
    # Python 3.12 warns about every fork of a process with threads; torch's worker processes are
    # forked.
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    # torch warns about more workers than cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
REQUESTS = [BatchRequest(0, low, low + 2, shuffled=False) for low in range(0, 12, 2)]
EXPECTED = [[low, low + 1] for low in range(0, 12, 2)]


class Stuck(list[int]):
    """Says when it has begun, and never ends."""

    begun = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: Any) -> Any:
        self.begun.set()
        time.sleep(600)


class KilledAtTheThird(list[int]):
    """As by the kernel when memory runs out."""

    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def make(dataset: Any = range(12), *, workers: int = 1, persistent: bool = True) -> BatchProducer:
    loading = LoadingOptions(workers=workers, persistent_workers=persistent)
    return BatchProducer(BatchMaker(dataset, seed=0), loading, torch.device("cpu"))


def as_lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [True, False])
def test_batches_come_in_the_order_of_the_requests_each_time(
    workers: int, persistent: bool
) -> None:
    with closing(make(workers=workers, persistent=persistent)) as stream:
        for _ in range(3):
            assert as_lists(stream.batches(REQUESTS)) == EXPECTED


def test_persistent_workers_stay_and_others_do_not() -> None:
    with closing(make()) as stream:
        list(stream.batches(REQUESTS))
        before = multiprocessing.active_children()
        list(stream.batches(REQUESTS))
        assert multiprocessing.active_children() == before != []
    with closing(make(persistent=False)) as stream:
        list(stream.batches(REQUESTS))
        assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_end_with_the_stream(persistent: bool) -> None:
    stream = make(workers=2, persistent=persistent)
    next(stream.batches(REQUESTS))
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    stream.close()
    assert not multiprocessing.active_children()
    # closed is not broken: it starts new workers
    assert as_lists(stream.batches(REQUESTS)) == EXPECTED
    stream.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_sequence_that_is_given_up_leaves_no_workers(persistent: bool) -> None:
    with closing(make(persistent=persistent)) as stream:
        given_up = stream.batches(REQUESTS)
        next(given_up)
        assert as_lists(stream.batches(REQUESTS)) == EXPECTED
        assert len(multiprocessing.active_children()) == persistent


def test_workers_end_when_the_stream_is_forgotten() -> None:
    stream = make()
    batches = stream.batches(REQUESTS)
    next(batches)
    del stream
    assert not multiprocessing.active_children()


def test_workers_leave_signals_to_the_rank() -> None:
    """torchrun and Slurm send SIGTERM to the whole group; the rank still wants to finish its
    step."""
    with closing(make()) as stream:
        batches = stream.batches(REQUESTS)
        next(batches)
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGINT)
        assert as_lists(batches) == EXPECTED[1:]


def test_a_worker_collects_nothing_before_it_has_frozen_what_it_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free CUDA memory or an event of the rank would abort it."""
    seed = random.seed

    def observed(*args: Any) -> None:  # torch calls it first in a worker
        first = tmp_path / str(os.getpid())
        first.exists() or first.write_text(str(gc.isenabled()))
        seed(*args)

    monkeypatch.setattr(random, "seed", observed)
    with closing(make()) as stream:
        assert as_lists(stream.batches(REQUESTS)) == EXPECTED
    assert [path.read_text() for path in tmp_path.iterdir()] == ["False"]
    assert gc.isenabled()


def test_a_worker_that_is_killed_is_reported_and_can_be_cleared_away() -> None:
    with closing(make(KilledAtTheThird(range(12)))) as stream:
        batches = stream.batches(REQUESTS)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(
            TrainingError, match=r"DataLoader worker \d+ \(exit code -9\) died"
        ) as caught:
            next(batches)
        assert "out of memory" in str(caught.value)
        # As if it had been killed while it held this lock, which torch's own shutdown waits for.
        stream._running[0]._workers_done_event._cond.acquire()


def test_an_error_in_a_worker_that_lives_is_passed_on() -> None:
    class Failing(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("the tape is torn")

    with (
        closing(make(Failing(range(12)))) as stream,
        pytest.raises(RuntimeError, match="the tape is torn"),
    ):
        next(stream.batches(REQUESTS))


def test_a_worker_that_is_stuck_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    stream = make(Stuck(range(12)))
    stream.batches(REQUESTS)
    assert Stuck.begun.wait(20)
    stream.close()
    assert not multiprocessing.active_children()


@pytest.mark.soak
@pytest.mark.slow
def test_a_worker_that_is_stuck_does_not_keep_the_process_from_ending() -> None:
    script = """
import sys
from torch.utils.data import _utils
import test_workers
_utils.MP_STATUS_CHECK_INTERVAL = 0.2
stream = test_workers.make(test_workers.Stuck(range(12)))
batches = stream.batches(test_workers.REQUESTS)
assert test_workers.Stuck.begun.wait(20)
sys.exit(7)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=False)
    assert done.returncode == 7


def test_a_worker_uses_a_generator_of_its_own() -> None:
    before = torch.get_rng_state()
    with closing(make()) as stream:
        list(stream.batches(REQUESTS))
    assert torch.equal(torch.get_rng_state(), before)


class Works(list[int]):
    """Samples that take some work."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(range(12))
        self.work = work

    def __getitem__(self, index: Any) -> Any:
        self.work()
        return index
