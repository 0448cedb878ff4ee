"""The status of a run: what is written, what is read back, and how it reads on four ranks and on
256."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from drumline.runs.step_times import LongStep, StepTimes
from drumline.watch.cluster_state import ClusterState, LostNode, NodeState, RankState
from drumline.watch.heartbeat import Phase
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.sidecar.sidecar_reporter import SidecarReporter
from drumline.watch.status_file import (
    STATUS_FILE,
    Notice,
    RunPace,
    StepRates,
    read_status_file,
    read_step_times,
    status_record,
)
from drumline.watch.status_table import RowLevel, all_rows, fitting_rows, summary_line


def rank(number: int, host: str = "node-a", **facts: Any) -> RankState:
    usual: dict[str, Any] = {
        "step": 812,
        "phase": Phase.FORWARD,
        "age_s": 0.04,
        "cpu": 1.0,
        "state": "R",
    }
    return RankState(rank=number, host=host, pid=100 + number, **{**usual, **facts})


def picture(*ranks: RankState, lost: tuple[LostNode, ...] = ()) -> ClusterState:
    hosts = sorted({rank_state.host for rank_state in ranks})
    nodes = [
        NodeState(
            node=node,
            host=host,
            ranks=tuple(rank_state for rank_state in ranks if rank_state.host == host),
        )
        for node, host in enumerate(hosts)
    ]
    return ClusterState(me=0, nodes=tuple(nodes), lost=lost)


def status(*ranks: RankState, lost: tuple[LostNode, ...] = (), **options: Any) -> dict[str, Any]:
    size = len(ranks) + sum(len(lost_host.ranks) for lost_host in lost)
    usual = {"now": 1000.0, "world_size": size, "hang_s": 60, "pace": RunPace({}, None)}
    return status_record(picture(*ranks, lost=lost), **{**usual, **options})


def test_what_is_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    lost_host = LostNode(node=1, host="node-b", ranks=(2, 3), no_heartbeat_s=5.04, how="no answer")
    notices = [Notice("stall", f"stall: {number}") for number in range(7)]
    record = status(
        rank(0),
        rank(1, failure="ValueError: no"),
        lost=(lost_host,),
        pace=RunPace({0: 3.14159}, None),
        notices=notices,
    )
    file = tmp_path / "status.json"
    assert read_status_file(file) is None
    file.write_text(json.dumps(record))
    assert read_status_file(file) == record
    assert (record["leader"], record["world_size"], record["hang_s"], record["has_ended"]) == (
        "node-a",
        4,
        60,
        False,
    )
    assert record["notices"] == [asdict(notice) for notice in notices[2:]]
    assert record["ranks"][0] == {
        "rank": 0, "host": "node-a", "step": 812, "phase": "forward", "age_s": 0.04, "rate": 3.142, "state": "R",
        "cpu": 1.0, "exit": None, "failure": "",
    }  # fmt: skip
    for damaged in (
        "",
        "[]",
        json.dumps({**record, "version": 1}),
        '{"version": 3}',
        json.dumps({**record, "ranks": [{}]}),
    ):
        file.write_text(damaged)
        assert read_status_file(file) is None


def test_rates_are_of_the_last_seconds_and_of_this_process() -> None:
    rates = StepRates()
    assert rates.update(picture(rank(0, step=0)), 0.0) == {}
    for second in range(1, 31):
        measured = rates.update(
            picture(rank(0, step=second * 4 if second < 15 else 60 + second)), float(second)
        )
    assert measured[0] == pytest.approx(1.0)
    again = replace(rank(0, step=0), pid=7)
    assert rates.update(picture(again, rank(1)), 31.0) == {}


WAITS = {"phase": Phase.BACKWARD, "age_s": 5.0, "cpu": 0.01, "state": "S"}


@pytest.mark.parametrize(
    ("facts", "words", "level"),
    [
        ({}, "trains", RowLevel.GOOD),
        ({"phase": Phase.START, "age_s": 90.0}, "starts", RowLevel.GOOD),
        ({"phase": Phase.COMPILE, "age_s": 1.0}, "compiles, 3 ranks waiting", RowLevel.GOOD),
        (
            {"phase": Phase.COMPILE, "age_s": 90.0, "cpu": 0.0},
            "compiles, 3 ranks waiting",
            RowLevel.GOOD,
        ),
        ({**WAITS, "phase": Phase.COMPILED}, "waits for others", RowLevel.GOOD),
        ({"phase": Phase.EVALUATION}, "evaluates", RowLevel.GOOD),
        ({"phase": Phase.SAVE}, "saves", RowLevel.GOOD),
        (
            {"phase": Phase.SAVE, "age_s": 9.0, "cpu": 0.0},
            "saves, 3 ranks waiting",
            RowLevel.SUSPECT,
        ),
        (WAITS, "waits for others", RowLevel.GOOD),
        ({"phase": Phase.DATA, "age_s": 5.0}, "loads data, 3 ranks waiting", RowLevel.SUSPECT),
        (
            {"phase": Phase.DATA, "age_s": 5.0, "cpu": 0.0},
            "blocked in data, 3 ranks waiting",
            RowLevel.SUSPECT,
        ),
        ({"age_s": 5.0}, "computes, 3 ranks waiting", RowLevel.SUSPECT),
        (
            {"age_s": 5.0, "state": "D", "cpu": 0.0},
            "waits for storage or a device (state D), 3 ranks waiting",
            RowLevel.SUSPECT,
        ),
        ({"state": "T"}, "stopped by a signal", RowLevel.BAD),
        ({"state": "t"}, "paused by a debugger", RowLevel.SUSPECT),
        ({"state": "X"}, "exited", RowLevel.BAD),
        ({"exit": -9}, "killed by SIGKILL", RowLevel.BAD),
        ({"exit": -99}, "killed by signal 99", RowLevel.BAD),
        ({"exit": 1}, "exited with code 1", RowLevel.BAD),
        ({"exit": 0}, "done", RowLevel.GOOD),
        ({"phase": Phase.FAILED, "failure": "KeyError: 7"}, "crashed: KeyError: 7", RowLevel.BAD),
        ({"phase": Phase.LEFT}, "left the loop; others have not", RowLevel.SUSPECT),
    ],
)
def test_what_a_rank_does_in_words(facts: dict[str, Any], words: str, level: RowLevel) -> None:
    rows = all_rows(status(rank(0, **WAITS), rank(1, **facts), rank(2, **WAITS), rank(3, **WAITS)))
    assert (rows[1].state, rows[1].level) == (words, level)
    assert {row.state for row in (rows[0], *rows[2:])} == {"waits for others"}


def test_ranks_that_have_left_and_long_work_that_nobody_waits_for_are_good() -> None:
    assert {
        row.state for row in all_rows(status(*(rank(n, phase=Phase.LEFT) for n in range(3))))
    } == {"done"}
    busy = {"phase": Phase.COMPILE, "age_s": 90.0}
    assert {row.state for row in all_rows(status(rank(0, **busy), rank(1, **busy)))} == {"compiles"}
    compiles = all_rows(status(rank(0, age_s=30.0), rank(1, age_s=30.0)))
    assert {(row.state, row.level) for row in compiles} == {("computes", RowLevel.GOOD)}


def test_a_lost_host_comes_first() -> None:
    lost_host = LostNode(node=1, host="node-b", ranks=(2, 3), no_heartbeat_s=5.04, how="no answer")
    record = status(
        rank(0, age_s=120.0),
        rank(1, step=813, age_s=1.5),
        lost=(lost_host,),
        pace=RunPace({0: 3.14159, 1: 0.123}, None),
    )
    first, *further_rows = all_rows(record)
    assert (first.host, first.rank, first.state) == (
        "node-b",
        "2-3",
        "no heartbeat for 5 s: no answer",
    )
    assert [(row.age, row.rate) for row in further_rows] == [
        ("2 min 00 s", "3.1"),
        ("1.5 s", "0.12"),
    ]
    assert (
        summary_line(record) == "step 812-813, 3.1 steps/s: 4 ranks on 2 hosts, 1 needs attention"
    )
    assert summary_line(status(rank(0, step=0))) == "step 0: 1 rank on 1 host"


@pytest.mark.parametrize("room", [1, 2, 5, 12, 40, 256, 300])
@pytest.mark.parametrize("odd", [0, 1, 100])
def test_256_ranks_fit_and_the_odd_ones_are_seen(room: int, odd: int) -> None:
    ranks = [
        rank(n, f"node-{n // 8:02d}", state="T" if n % 255 and n <= odd else "R")
        for n in range(256)
    ]
    rows = fitting_rows(
        status(*ranks, pace=RunPace(dict.fromkeys(range(256), 2.0), None)), max_rows=room
    )
    assert 0 < len(rows) <= room
    if odd:
        assert max(row.level for row in rows) is RowLevel.BAD
        assert rows[0].state == "stopped by a signal" or room >= 256
    if room == 40 and odd == 1:
        assert len(rows) == 33
        assert (rows[0].rank, rows[1].rank, rows[2].rank) == ("1", "7 ranks", "8 ranks")
        assert (rows[2].host, rows[2].step, rows[2].rate, rows[2].state) == (
            "node-01",
            "812",
            "2.0",
            "trains",
        )
    if room == 12 and odd == 0:
        assert rows[-1].host == "21 hosts"
        assert rows[-1].state == "trains"
    if room == 5 and odd == 100:
        assert rows[-1].state.endswith(" differ")


def test_two_leaders_write_the_status_at_the_same_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in a network partition, or when the sidecar of the start before still runs."""

    def reporter(host: str) -> SidecarReporter:
        options = SidecarOptions(
            folder=str(tmp_path),
            owns_folder=False,
            node=0,
            host=host,
            ranks=(0,),
            world_size=2,
            run=str(tmp_path),
        )
        return SidecarReporter(options)

    async def write() -> None:
        leaders = [reporter("node-a"), reporter("node-b")]
        for _ in range(300):
            for leader in leaders:
                leader.write_status(status(rank(0)))
            await asyncio.sleep(0.0005)
        for leader in leaders:
            await leader.drain()

    asyncio.run(write())
    assert capfd.readouterr().err == ""
    assert read_status_file(tmp_path / STATUS_FILE) == status(rank(0))
    assert [path.name for path in (tmp_path / "watch").iterdir()] == ["status.json"]


def test_the_times_of_all_steps_are_in_the_status(tmp_path: Path) -> None:
    times = StepTimes(
        rank=1,
        count=900,
        median_s=0.1,
        p99_s=0.4,
        stalls=20,
        stalled_part=0.06,
        longest=(LongStep(step=812, seconds=0.7),),
    )
    file = tmp_path / STATUS_FILE
    file.parent.mkdir()
    assert read_step_times(tmp_path) is None
    file.write_text(json.dumps(status(rank(0))))
    assert read_step_times(tmp_path) is None
    file.write_text(json.dumps(status(rank(0), pace=RunPace({}, times))))
    assert read_step_times(tmp_path) == times
