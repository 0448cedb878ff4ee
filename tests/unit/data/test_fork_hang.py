"""A worker that hangs in `fork` is forked again. The race is real: a thread without the GIL takes
the lock."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time

import pytest

from drumline.data import delivery
from tests.forks import EXPECTED, interpreter_lock_taken, load_in_new_workers

MAX_STARTS = 300
"""About one in seven hangs."""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 takes the lock before it forks"
)
def test_a_worker_that_hangs_in_fork_is_forked_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "FORK_ATTEMPTS", 50)  # far more often than in a run
    with interpreter_lock_taken(), caplog.at_level(logging.WARNING, "drumline"):
        for _ in range(MAX_STARTS):
            assert load_in_new_workers() == EXPECTED
            if caplog.messages:
                break
    assert "hung in fork (fixed in Python 3.12) and was forked again" in caplog.messages[0]
    assert not multiprocessing.active_children()


class SleepsInFork(delivery._ForkedWorker):
    """As one whose after-fork hook waits for something."""

    def run(self) -> None:
        time.sleep(0.5)
        super().run()


def test_a_child_that_sleeps_every_time_is_not_touched(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens every time is no race: the last attempt is not ended, however long it takes."""
    monkeypatch.setattr(delivery, "FORK_ATTEMPTS", 2)
    monkeypatch.setattr(delivery, "STUCK_AFTER_S", 0.1)
    with caplog.at_level(logging.WARNING, "drumline"):
        child = SleepsInFork(target=os._exit, args=(7,))
        child.start()
        child.join()
    assert child.exitcode == 7
    assert len(caplog.messages) == 1


class EndsAtOnce(delivery._ForkedWorker):
    def run(self) -> None:
        os._exit(3)


def test_a_child_that_ends_at_once_is_not_waited_for() -> None:
    child = EndsAtOnce()
    child.start()
    child.join()
    assert child.exitcode == 3
