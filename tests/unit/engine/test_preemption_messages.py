"""What a rank reports that is preempted and cannot save."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from drumline.engine.preemption import Preemption


class GivenUp:
    """A vote that ended without a step to stop at."""

    is_decided, stop = True, None

    def __init__(self, told: int) -> None:
        self.cause = {"signal": "SIGTERM", "host": "node-a", "rank": told}

    def tick(self) -> bool:
        return False

    def missing_ranks(self) -> list[int]:
        return [1, 4, 5, 6]


@pytest.mark.parametrize("told", [0, 3])
def test_ranks_that_do_not_answer_are_named_by_the_one_that_asked_first(
    told: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    preemption: Any = Preemption()
    preemption._place, preemption._first = {"host": "node-a", "rank": 0}, (signal.SIGTERM, 0.0)
    preemption._vote = GivenUp(told)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    preemption._tick()
    assert ended == [143]
    assert "".join(capfd.readouterr()) == (
        ""
        if told
        else "drumline: rank 0 on node-a received SIGTERM and exits without a save: ranks 1, 4-6 did not answer\n"
        "  try: find out what blocks ranks 1, 4-6; rerun the same command to resume from the newest checkpoint\n"
    )


def test_a_notice_that_the_others_do_not_answer_is_reported_once_and_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preemption: Any = Preemption()
    preemption._place, preemption._vote = {"host": "node-a", "rank": 0}, GivenUp(0)
    preemption._vote.cause["signal"] = "a notice at leave.txt"
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    preemption._tick()
    preemption._tick()
    assert (ended, preemption.is_asked) == ([], False)
    assert [record.getMessage() for record in caplog.records] == [
        "received a notice at leave.txt, but ranks 1, 4-6 did not answer: the run continues; if the machine is "
        "reclaimed, the steps after the newest checkpoint are lost"
    ]
