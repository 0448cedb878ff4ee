"""Nodes that join, or do not: missing ones are named, fewer nodes continue, and every wait is
reported.

The hosts run `drumline launch --env-file`, as a person would type it on each.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import firewall, restarts
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.warm import warm_python

MakeTestbed = Callable[..., Testbed]
# Says who it is, and goes on until it is told to end; it loads no torch.
STAY = """
import os, sys, time
from pathlib import Path
print(f"here: rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""

# Holds until the test lets it go on: with two ranks when step 2 is saved, with one when step 4 is.
GATED = """
import os, time
from pathlib import Path
from drumline.training.tasks import ImageClassification

class Gated(ImageClassification):
    defaults = {
        "data.name": "digits", "model.widths": [8], "train.steps": 8, "train.batch_size": 32,
        "train.exact": "elastic", "checkpoint.every_steps": 2, "checkpoint.keep_last": 9,
        "checkpoint.background": False,  # all ranks see it in the same step
    }

    def loss(self, model, batch):
        saved = 2 if os.environ.get("WORLD_SIZE") == "2" else 4
        if not Path("go").exists() and Path(f"run/checkpoints/step-{saved:08d}").exists():
            print("holding with", os.environ["WORLD_SIZE"], flush=True)
            while not Path("go").exists():
                time.sleep(0.05)
        return super().loss(model, batch)
"""


class Jobs:
    """Starts `drumline launch --env-file` on hosts with the rendezvous at `first`."""

    def __init__(self, folder: Path, first: Host, *, nodes: str, flags: tuple[str, ...]) -> None:
        self.folder = folder
        self.first = first
        self.nodes = nodes
        self.flags = flags
        (folder / "stay.py").write_text(STAY)
        self.finish = folder / "finish"

    def start(self, host: Host, rank: int, *program: str, first: str | None = None) -> Job:
        file = self.folder / f"{host.name}-{rank}.env"
        file.write_text(
            f"NUMBER_OF_NODES={self.nodes}\nNODE_RANK={rank}\nNUMBER_OF_GPUS=1\n"
            f"MASTER_ADDR={first or self.first.address}\nMASTER_PORT=29500\nGLOO_SOCKET_IFNAME=eth0\n"
        )
        words = program or (str(self.folder / "stay.py"), str(self.finish))
        launch = (host.python, "-m", "drumline", "launch", *self.flags, "--env-file", str(file))
        return host.start(*launch, *words, cwd=self.folder, env={"PYTHONPATH": str(Path.cwd())})


@pytest.mark.soak
def test_a_job_continues_with_fewer_nodes_and_names_who_is_missing(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    a, b, c = make_testbed("a", "b", "c", warm=True).hosts
    jobs = Jobs(tmp_path, a, nodes="2:3", flags=("--last-call", "2", "--lost-after", "3"))
    on_a = jobs.start(a, 0)
    on_b = jobs.start(b, 1)
    for job, rank in ((on_a, 0), (on_b, 1)):
        job.wait_for("drumline: warning: training continues on 2 of 3 nodes, without node 2\n")
        job.wait_for(f"here: rank {rank} of 2")

    on_c = jobs.start(c, 2)
    for job, rank in ((on_a, 0), (on_b, 1), (on_c, 2)):
        job.wait_for(f"here: rank {rank} of 3")
    assert (
        "restarting the ranks (node 2 (c) joined); the script starts from the beginning"
        in on_a.text()
    )

    again = jobs.start(c, 1)
    first_again = jobs.start(b, 0)
    assert [again.wait(), first_again.wait()] == [3, 3]
    assert "NODE_RANK 1 is taken: the launcher of node 1 runs on b" in again.text()
    assert "10.77.0.1 is not an address of b, which has 10.77.0.2" in first_again.text()

    # Cut, not switched off: nobody gets an error from the network, as with a host that loses its
    # power.
    b.cut()
    for job in (on_a, on_c):
        job.wait_for("restarting the ranks (node 1 (b) is lost)")
        job.wait_for("drumline: warning: training continues on 2 of 3 nodes, without node 1 (b)\n")
    on_c.wait_for("here: rank 1 of 2")

    a.cut()
    assert [on_b.wait(), on_c.wait()] == [1, 1]
    for job in (on_b, on_c):
        assert (
            "the first node, node 0 (a), is lost or unreachable: nothing answers at 10.77.0.1:29500"
            in job.text()
        )
    assert "drumline: warning: the job ended on 2 of 3 nodes, without node 1 (b)" in on_c.text()


@pytest.mark.soak
def test_who_never_came_is_named_and_why_on_both_sides(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    a, b, c, d = make_testbed("a", "b", "c", "d", warm=True).hosts
    firewall.drop_port(a, 29500)
    jobs = Jobs(tmp_path, a, nodes="2", flags=("--join-timeout", "9"))
    on_a = jobs.start(a, 0)
    on_b = jobs.start(b, 1)

    # One that came and is killed, while the others wait: a job that may not start again does not
    # wait for it.
    jobs = Jobs(tmp_path, c, nodes="2", flags=("--lost-after", "3"))
    on_c = jobs.start(c, 0)
    on_d = jobs.start(d, 1)
    for job in (on_c, on_d):
        job.wait_for("here: rank")
    on_d.send(signal.SIGKILL)
    assert on_c.wait() == 1
    assert (
        "drumline: error: node 1 (d) is lost, and no restart is left\n  try: check what ended it"
        in on_c.text()
    )

    assert [on_a.wait(), on_b.wait()] == [3, 3]
    assert "drumline: waiting at 10.77.0.1:29500 for node 1, " in on_a.text()
    assert "node 0 waited 9 s at 10.77.0.1:29500: node 1 did not join" in on_a.text()
    assert "drumline: waiting for the first node at 10.77.0.1:29500: " in on_b.text()
    assert (
        "within 9 s: no answer (a firewall drops the packets, or the host is down)" in on_b.text()
    )


def test_no_restart_is_lost(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    assert (
        restarts.on_two_hosts(make_testbed("a", "b", warm=True), tmp_path / "hosts", count=2) == ""
    )
    with warm_python(tmp_path / "warm") as python:
        assert restarts.on_this_machine(tmp_path / "here", count=1, python=python) == ""


@pytest.mark.soak
def test_a_task_that_loses_a_node_and_gets_it_back_ends_with_the_same_weights(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    a, b = make_testbed("a", "b", warm=True).hosts
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "go").touch()
    for folder in (tmp_path, alone):
        (folder / "mine.py").write_text(GATED)
    task = ("mine.py:Gated", "--run", "run", "--fresh", "--dist.start_timeout_s", "60")
    jobs = Jobs(tmp_path, a, nodes="1:2", flags=("--last-call", "6", "--lost-after", "3"))
    on_b = jobs.start(b, 1, *task)  # first: a waits only for the last call
    on_a = jobs.start(a, 0, *task)
    undisturbed = a.start(
        *(a.python, "-m", "drumline", "train", "mine.py:Gated", "--run", "run"),
        cwd=alone,
        env={"PYTHONPATH": str(Path.cwd())},
    )
    on_a.wait_for("holding with 2")
    b.power_off()
    on_a.wait_for("drumline: warning: training continues on 1 of 2 nodes, without node 1 (b)")
    on_a.wait_for("holding with 1")
    b.power_on()
    on_b = jobs.start(b, 1, *task)
    on_a.wait_for(
        "restarting the ranks (node 1 (b) joined); they resume from the newest checkpoint"
    )
    (tmp_path / "go").touch()
    assert [on_a.wait(), on_b.wait()] == [0, 0], on_a.text() + on_b.text()
    # The loss of a node costs the steps since a checkpoint; to let one in, the ranks save first.
    first, second = map(int, re.findall(r"resumed at step (\d+) from", on_a.text()))
    assert (first, second >= 4) == (2, True), on_a.text()
    assert "the job ended on" not in on_a.text(), "all were there at the end"

    assert undisturbed.wait() == 0, undisturbed.text()
    ends = [folder / "run/checkpoints/step-00000008" for folder in (tmp_path, alone)]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()
