"""What a launch over ssh does when sidecars have ended all ranks, or name the rank that failed
first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_diagnosis_command import SCRIPT, SENTENCE, SIDECAR, starts_of
from tests.multinode import processes
from tests.multinode.test_lost_hosts import RANKS, kill_agent
from tests.multinode.test_ssh_launch import Desk, MakeTestbed


def test_ranks_that_were_ended_on_all_hosts_restart_once_and_the_diagnosis_is_printed_once(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    desk = Desk(make_testbed("a", "b", warm=True), tmp_path)
    (tmp_path / "stands.py").write_text(SCRIPT)
    (tmp_path / "sidecar.py").write_text(SIDECAR)
    job = desk.launch(
        *("--hosts", "a,b", "--procs", "1", "--max-restarts", "1", "--logs", "logs"),
        *("stands.py", "hang", "restart", "2"),
    )
    job.wait_for("restarting the ranks")
    secret = starts_of(tmp_path, 0)[0]["DRUMLINE_SECRET"]
    assert not any(
        secret in processes.command(pid) for host in desk.bed for pid in host.space.pids()
    )
    code = job.wait()
    text = job.text()
    assert code == 70, text
    starts = [starts_of(tmp_path, rank) for rank in range(2)]
    assert [len(start) for start in starts] == [2, 2], text
    assert len({one["DRUMLINE_SECRET"] for each in starts for one in each}) == 2, (
        "each start has its own"
    )
    for first, second in zip(*starts, strict=True):
        assert first["DRUMLINE_SECRET"] == second["DRUMLINE_SECRET"]
        assert first["DRUMLINE_WATCH_NODES"] == second["DRUMLINE_WATCH_NODES"]
        assert [word.partition(":")[0] for word in first["DRUMLINE_WATCH_NODES"].split(",")] == [
            "a",
            "b",
        ]
    assert text.count(SENTENCE) == 2, "before the restart, and as the last word"
    assert text.endswith(f"drumline: {SENTENCE}\ndrumline: logs in logs on each host\n")
    assert "failed first" not in text
    assert secret not in text + "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


LEAVES = """
import os
from drumline.training.tasks import ImageClassification

class Leaves(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [4], "train.steps": 30, "train.batch_size": 64,
        "checkpoint.every_steps": 2,
    }
    seen = 0

    def loss(self, model, batch):
        self.seen += 1
        # At the same step each time: a job that makes progress is never given up.
        last = 2 if os.environ.get("DRUMLINE_RESTARTED") else 6
        if self.seen == last and os.environ["RANK"] == "1":
            os._exit(0)
        return super().loss(model, batch)
"""
BLAMES_RANK_1 = "drumline: failure: rank 1 on b left the loop"


@pytest.mark.soak
def test_a_rank_that_exits_with_code_0_is_blamed_to_the_end(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    desk = Desk(make_testbed("a", "b", warm=True), tmp_path)
    (tmp_path / "mine.py").write_text(LEAVES)
    words = [
        "--hosts",
        "a,b",
        "--procs",
        "1",
        "--max-restarts",
        "1",
        "--logs",
        "logs",
        "--env",
        "OMP_NUM_THREADS=1",
    ]
    job = desk.launch(*words, "mine.py:Leaves", "--run", "run")
    code = job.wait(120)
    text = job.text()
    assert code == 1, text
    assert "rank 0 on a crashed" not in text, "it lost its peer, as its log says"
    assert "failed first" not in text, text
    diagnosis, logs = text.splitlines()[-2:]
    assert diagnosis.startswith(BLAMES_RANK_1), text
    assert logs == "drumline: logs in logs on each host"
    lines = (tmp_path / "run" / "events" / "rank-00000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    recovered = [event for event in events if event["kind"] == "recovered"]
    assert [(event["about_rank"], event["about_host"], event["cause"]) for event in recovered] == [
        (1, "b", "left_early")
    ]
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert "rank 0 on a stopped at step 5 because rank 1 on b left the loop" in log, log


# When the sidecars watch: a job that ends within a second is not diagnosed.
SCRIPT_THAT_LEAVES = """
import os, time, torch
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
while not Path(os.environ["DRUMLINE_WATCH_DIR"], "sidecar.pid").exists():
    time.sleep(0.02)
for number in range(1000):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
    if number == 40 and dist.get_rank() == 1:
        os._exit(0)
"""


@pytest.mark.soak
def test_a_script_whose_rank_exits_with_code_0_ends_with_the_diagnosis(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    desk = Desk(make_testbed("a", "b", warm=True), tmp_path)
    (tmp_path / "leaves.py").write_text(SCRIPT_THAT_LEAVES)
    job = desk.launch("--hosts", "a,b", "--procs", "1", "--watch", "--logs", "logs", "leaves.py")
    code = job.wait(120)
    text = job.text()
    assert code == 1, text
    assert "failed first" not in text, text
    assert text.splitlines()[-2].startswith(BLAMES_RANK_1), text


@pytest.mark.soak
def test_an_agent_that_is_killed_under_a_plain_script_is_named_at_the_end(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    desk = Desk(make_testbed("a", "b", warm=True), tmp_path)
    (tmp_path / "ranks.py").write_text(RANKS)
    words = [
        "--hosts",
        "a,b",
        "--procs",
        "1",
        "--max-restarts",
        "0",
        "--logs",
        "logs",
        "--grace",
        "3",
    ]
    job = desk.launch(*words, "--env", "PYTHONUNBUFFERED=1", "ranks.py")
    for rank, host in enumerate("ab"):
        job.wait_for(f"rank {rank} on {host}: start 1, ", timeout_s=90)
    kill_agent(desk.bed["b"])
    code = job.wait(90)
    text = job.text()
    assert code == 1, text
    assert text.splitlines()[-3:] == [
        "drumline: the launcher's agent on b was killed by SIGKILL, which ended its ranks",
        "  try: find out who killed it: an operator, a batch system, or the OOM killer (dmesg on b)",
        "drumline: logs in logs on each host",
    ], text
    assert not desk.bed["b"].find("RANK=1"), "its ranks have ended with it"
