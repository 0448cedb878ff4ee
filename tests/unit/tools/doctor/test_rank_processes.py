"""The ranks of the collectives: one line from each, and none is left, whatever they do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.base.processes import parent_of
from drumline.launch.hosts import Host
from drumline.launch.ssh.host_connection import HostConnection
from drumline.tools.doctor.pairs.examination import NodeClient
from drumline.tools.doctor.ranks import rank_processes
from drumline.tools.doctor.ranks.rank_processes import (
    HostRanks,
    RankProcesses,
    collective_findings,
    collectives_line,
)

GOOD = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print("a line of somebody else")
print(json.dumps({"findings": [], "seen": [os.environ[name] for name in names]}))
"""

NUMBERS = {"all_reduce_bytes": 4 << 20, "all_reduce_gb_per_s": 1.5, "all_reduce_latency_us": 80.2}
MEASURED = "all_reduce of 4 MiB at 1.5 GB/s, the smallest in 80 us"


def host_ranks(num_procs: int = 2, limit_s: float = 30.0) -> HostRanks:
    return HostRanks(
        first_rank=4, num_procs=num_procs, world_size=8, address="a", port=29500, limit_s=limit_s
    )


def run(program: str, monkeypatch: pytest.MonkeyPatch, **choices: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(rank_processes, "PROGRAM", ("-c", program))
    return RankProcesses().run(host_ranks(**choices), {})


def test_each_rank_has_its_place_and_says_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run(GOOD, monkeypatch)
    assert first["rank"] == 4
    assert first["result"]["seen"] == ["4", "8", "0", "2", "a", "29500"]
    assert second["result"]["seen"] == ["5", "8", "1", "2", "a", "29500"]


def test_a_rank_that_fails_or_hangs_is_reported_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (failed,) = run("raise ImportError('no torch here')", monkeypatch, num_procs=1)
    assert failed["error"] == "exited with code 1: ImportError: no torch here"
    (hung,) = run(
        "import sys, time; print('waiting', file=sys.stderr, flush=True); time.sleep(99)",
        monkeypatch,
        num_procs=1,
        limit_s=1.0,
    )
    assert hung["error"] == "still running after 1 s: waiting"
    (finding,) = collective_findings([{"host": "b", **failed}], {})
    assert finding.line() == (
        "problem: b: rank 4 gave no result: exited with code 1: ImportError: no torch here"
    )


def test_all_end_when_the_node_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"import pathlib, os, time; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(99)"
    monkeypatch.setattr(rank_processes, "PROGRAM", ("-c", program))
    group = RankProcesses()
    runner = threading.Thread(target=group.run, args=[host_ranks(), {}])
    runner.start()
    while len(pids := list(tmp_path.iterdir())) < 2:
        pass
    group.kill()
    runner.join()
    assert not [pid for pid in pids if Path("/proc", pid.name).exists()]


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from drumline.tools.doctor.ranks import rank_processes
folder = Path(sys.argv[1])
rank = f"import pathlib, os, time; pathlib.Path({str(folder)!r}, str(os.getpid())).touch(); time.sleep(99)"
rank_processes.PROGRAM = ("-c", rank)
ranks = rank_processes.HostRanks(first_rank=0, num_procs=2, world_size=2, address="a", port=1, limit_s=60)
threading.Thread(target=rank_processes.RankProcesses().run, args=[ranks, {}], daemon=True).start()
while len(list(folder.iterdir())) < 2:
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_end_when_the_node_is_killed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    # 0 also for one that only waits to be buried
    while any(parent_of(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlives the node"
        time.sleep(0.05)


def test_what_ranks_found_is_reported_once() -> None:
    finding = {
        "level": "problem",
        "check": "collectives",
        "where": "b",
        "what": "wrong sum",
        "fix": "mend",
    }
    result = {"findings": [finding], "numbers": NUMBERS}
    outcomes = [{"host": "me@b", "rank": rank, "result": result} for rank in range(2)]
    assert [finding.line() for finding in collective_findings(outcomes, {"b": "me@b"})] == [
        "problem: me@b: wrong sum"
    ]
    assert collectives_line(outcomes) == "collectives: 2 ranks, some checks failed; " + MEASURED
    blamed = {**finding, "what": "rank 2 on b is stopped", "rank": 2}
    silent = {"host": "b", "rank": 2, "result": None, "error": "killed by SIGKILL"}
    outcomes = [{"host": "b", "rank": 0, "result": {"findings": [blamed], "numbers": {}}}, silent]
    assert len(collective_findings(outcomes, {})) == 1, "the other rank has explained it"
    good = [{"host": "b", "rank": 0, "result": {"findings": [], "numbers": {}}}]
    assert collectives_line(good) == "collectives: 1 rank, all values right"


def test_a_node_whose_input_ends_ends_too() -> None:
    async def try_it() -> int | None:
        words = [sys.executable, "-m", "drumline.tools.doctor.pairs.node_server"]
        connection = HostConnection(Host("host"), words, 20.0)
        client = NodeClient(connection)
        await client.open()
        assert (await client.ask("names", 20, names=["127.0.0.1"])).keys() == {"127.0.0.1"}
        assert connection.writer is not None
        connection.writer.close()
        await asyncio.wait_for(await connection.open(), 20)
        return connection.ssh_code

    assert asyncio.run(try_it()) == 0
