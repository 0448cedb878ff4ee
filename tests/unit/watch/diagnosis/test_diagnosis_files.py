"""Diagnoses on disk: complete, numbered, and readable."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from drumline.base.untrusted import from_json
from drumline.watch.cluster_state import ClusterState, LostNode
from drumline.watch.diagnosis.diagnosis import Alarm, Cause, Diagnosis, RaisedAlarm
from drumline.watch.diagnosis.diagnosis_files import read_diagnoses, write_diagnosis
from drumline.watch.diagnosis.watchdog import diagnose
from drumline.watch.heartbeat import Phase
from tests.unit.watch.diagnosis.sample_ranks import (
    IN_QUEUE,
    WORKER_IN_SAMPLE,
    cluster,
    late_rank,
    rank_state,
    worker,
)

PAGE = Path(__file__).with_name("stopped_worker.txt")
STUCK = cluster(
    late_rank(2, Phase.DATA, stack=IN_QUEUE, workers=(worker(0), worker(1, "T", WORKER_IN_SAMPLE))),
    world_size=4,
)


def told(
    folder: Path,
    cluster_state: ClusterState = STUCK,
    *,
    alarm: Alarm = Alarm.HANG,
    action: str = "restart",
    launch: str = "a1b2",
    unix_s: float = 1_700_000_000.0,
) -> Path:
    diagnosis = diagnose(cluster_state)
    assert diagnosis is not None
    raised = RaisedAlarm(alarm=alarm, diagnosis=diagnosis, action=action)
    return write_diagnosis(folder, raised, cluster_state, launch=launch, unix_s=unix_s)


def test_the_text_is_readable(tmp_path: Path) -> None:
    path = told(tmp_path / "diagnoses")
    assert path == tmp_path / "diagnoses" / "0001-stopped.json"
    assert path.with_suffix(".txt").read_text() == PAGE.read_text()
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "0001-stopped.json",
        "0001-stopped.txt",
    ]


def test_remarks_on_hosts_and_last_errors(tmp_path: Path) -> None:
    lost_node = LostNode(
        node=1, host="node-b", ranks=(4, 5, 6, 7), no_heartbeat_s=4.0, how="no answer"
    )
    killed = rank_state(1, state="X", exit=-9, phase=Phase.FORWARD, memory="the limit of 512 MiB")
    mute = rank_state(2, answers=False, phase=Phase.FORWARD, collective=7)
    failed = rank_state(3, exit=1, failure="ValueError: bad label", phase=Phase.FAILED)
    odd = cluster(
        killed,
        mute,
        failed,
        lost=(lost_node,),
        node_0={"link": "eth0 is down", "kernel": ("oom-kill: task=python",)},
    )
    odd = replace(
        odd,
        never_seen=(
            LostNode(node=2, host="node-c", ranks=(), no_heartbeat_s=3.1, how="no answer"),
        ),
    )
    text = told(tmp_path, odd, alarm=Alarm.FAILURE, action="stop").with_suffix(".txt").read_text()
    for line in (
        "2023-11-14 22:13:20 UTC. Action: the job is killed, and not restarted.",
        ">     1  node-a  killed: SIGKILL  forward    812  4.0 s  0.0  -",
        "      2  node-a  sleeping         forward    812  4.0 s  0.0  after #7",
        "      3  node-a  exited: 1        failed     812  4.0 s  0.0  -",
        "node-b, ranks 4-7: no heartbeat for 4.0 s (no answer)",
        "node-c: never seen, in 3.1 s (no answer)",
        "node-a: eth0 is down",
        "node-a, kernel: oom-kill: task=python",
        "rank 1, memory: the limit of 512 MiB",
        "rank 2: Python does not answer",
        "rank 3, error: ValueError: bad label",
    ):
        assert line in text.splitlines()


def test_two_leaders_in_a_partition_write_a_diagnosis_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda second: told(tmp_path, unix_s=float(second)), range(40)))
    assert sorted(int(path.name[:4]) for path in paths) == list(range(1, 41))
    assert sorted(record["time"] for record in read_diagnoses(tmp_path)) == list(range(40))
    assert not list(tmp_path.glob(".*"))


def test_what_was_written_is_read_and_what_is_not_ours_is_left_out(tmp_path: Path) -> None:
    assert read_diagnoses(tmp_path / "none") == []
    first = told(tmp_path, unix_s=1.5)
    second = told(tmp_path, alarm=Alarm.STALL, action="report", launch="c3")
    (tmp_path / "0003-stopped.json").write_text(second.read_text()[:200])
    (tmp_path / "0004-stopped.json").write_bytes(b"\xff\xfe")
    (tmp_path / "0005-stopped.json").write_text("[]")
    (tmp_path / "0006-stopped.json").write_text('{"diagnosis": {"cause": "rain"}}')
    (tmp_path / "notes.json").write_text(first.read_text())
    records = read_diagnoses(tmp_path)
    assert [(record["number"], record["alarm"], record["launch"]) for record in records] == [
        (1, "hang", "a1b2"),
        (2, "stall", "c3"),
    ]
    assert records[0]["time"] == 1.5
    diagnosis = from_json(Diagnosis, records[0]["diagnosis"])
    assert (diagnosis.cause, diagnosis.rank, diagnosis.step) == (Cause.STOPPED, 2, 812)
    assert records[0]["sentence"] == diagnosis.sentence("hang")
    assert records[0]["cluster"]["nodes"][0]["ranks"][2]["workers"][1]["state"] == "T"
    assert told(tmp_path).name == "0007-stopped.json", "a number that was used is not used again"


def test_a_folder_that_takes_nothing_is_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / ".0001-stopped.txt.partial").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        told(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".0001-stopped.txt.partial"]


def test_a_host_as_a_whole_is_marked(tmp_path: Path) -> None:
    diagnosis = diagnose(STUCK)
    assert diagnosis is not None
    path = told(tmp_path, STUCK)
    assert json.loads(path.read_text())["diagnosis"] == asdict(diagnosis)
    whole = replace(diagnosis, cause=Cause.UNREACHABLE, rank=None)
    raised = RaisedAlarm(alarm=Alarm.HANG, diagnosis=whole, action="?")
    path = write_diagnosis(tmp_path, raised, STUCK, launch="", unix_s=0.0)
    assert path.with_suffix(".txt").read_text().count("\n>") == 4


def test_the_sidecars_reasoning_does_not_load_torch() -> None:
    names = [f"drumline.watch.diagnosis.{name}" for name in ("diagnosis_files", "watchdog")]
    code = f"import sys, {', '.join(names)}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
