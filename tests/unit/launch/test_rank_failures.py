"""Which rank failed first, and how it is reported."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from drumline.base.text import how_it_ended
from drumline.launch.node.rank_logs import failure_time, rank_output
from drumline.launch.ssh.host_connection import RankFailure
from drumline.launch.ssh.hosts_launcher import in_order, last_messages


def failure(
    rank: int, failed_at: float, *words: str, code: int = 1, is_follower: bool = False
) -> RankFailure:
    host = "ab"[rank % 2]
    return RankFailure(
        host=host,
        rank=rank,
        code=code,
        failed_at=failed_at,
        restarts_left=0,
        last_lines=words,
        is_follower=is_follower,
    )


def test_the_earliest_is_first_unless_it_names_another() -> None:
    assert in_order([failure(1, 2.0), failure(0, 1.0)])[0].rank == 0
    follower = failure(0, 1.0, is_follower=True)
    assert in_order([follower, failure(1, 2.0, "x")])[0].rank == 1
    assert in_order([failure(0, 1.0), failure(1, 2.0)], blamed=1)[0].rank == 1, "by the diagnosis"
    assert in_order([failure(0, 1.0), failure(1, 2.0)], blamed=5)[0].rank == 0, (
        "which may blame one that exited with 0"
    )


def test_the_others_are_one_line() -> None:
    failures = [
        failure(rank, float(rank), "Traceback", "x", code=7 if rank else -9) for rank in range(6)
    ]
    assert list(last_messages(failures, 8)) == [
        (
            "rank 0 on a (killed by SIGKILL) failed first: x",
            "try: read the lines above that begin with [a 0]",
        ),
        (
            "the others: rank 1 on b (exit code 7) failed after it; rank 2 on a (exit code 7) failed after it; "
            "rank 3 on b (exit code 7) failed after it; 2 more failed; 2 ranks were stopped",
        ),
    ]
    assert list(last_messages([failure(0, 1.0)], 1)) == [
        ("rank 0 on a (exit code 1) failed first",)
    ]
    assert list(last_messages([failure(0, 1.0)], 2, lost_first=True)) == [
        ("the others: rank 0 on a (exit code 1) failed after it; 1 rank was stopped",)
    ]
    reported = replace(failure(0, 1.0, "Traceback", "ValueError: x"), error="KeyError: y")
    ((first, _),) = last_messages([reported], 1)
    assert first.endswith("failed first: KeyError: y")
    assert how_it_ended(-99) == "killed by signal 99"


def test_a_failure_is_as_old_as_its_traceback(tmp_path: Path) -> None:
    _, err = rank_output(tmp_path, 3, 1)
    assert err.name == "rank-00003.restart-1.err"
    now = time.monotonic()
    wall = time.time()
    assert failure_time(err) >= now, "nothing was written"
    err.write_text("Traceback (most recent call last):\nValueError\n")
    os.utime(err, (wall - 2, wall - 2))
    assert abs(failure_time(err) - (now - 2)) < 0.01, "by the clock that does not jump"
    err.write_text("a warning\n")
    os.utime(err, (wall - 2, wall - 2))
    assert failure_time(err) >= now, "words that were not about the end do not tell when it was"
