"""`drumline launch --detach` on real hosts: the job runs on without the laptop, and through reboots."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multinode import processes
from tests.multinode.detached import Cluster
from tests.multinode.hosts import Testbed

# Ranks that load no torch; they run until they are asked to end.
STAY = """
import os, socket, sys, time
from pathlib import Path
rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} on {socket.gethostname()}: {os.environ.get('TOKEN')}", flush=True)
while not Path("finish").exists():
    time.sleep(0.05)
print(f"rank {rank} is done", flush=True)
sys.exit(int(Path("finish").read_text() or 0) if rank == "1" else 0)
"""


@pytest.fixture(name="make_cluster")
def _make_cluster(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> Iterator[Callable[..., Cluster]]:
    clusters = []

    def make(*names: str, has_systemd: bool = True) -> Cluster:
        cluster = Cluster(
            make_testbed("laptop", *names, warm=True), tmp_path, has_systemd=has_systemd
        )
        (cluster.folder / "stay.py").write_text(STAY)
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


def test_a_job_runs_on_without_the_laptop(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster("a", "b")
    name = cluster.launch("--procs", "1", "--env", "TOKEN=hunter2", "stay.py")
    cluster.wait_for_state(name, "running")
    for host in cluster.hosts:
        assert not any("hunter2" in processes.command(pid) for pid in host.space.pids())

    listed = cluster.command("jobs", "--hosts", "a")
    assert f"{name}  running" in listed

    shown = cluster.start("attach", name, "--hosts", "b")
    for rank, host in enumerate("ab"):
        shown.wait_for(f"[{host} {rank}] rank {rank} of 2 on {host}: hunter2")
    shown.send(signal.SIGINT)
    assert shown.wait() == 0
    assert f"detached; {name} goes on" in shown.text()

    shown = cluster.start("attach", name, "--hosts", "a,b")
    shown.wait_for("[b 1] rank 1 of 2")
    (cluster.folder / "finish").write_text("9")
    assert shown.wait() == 9
    assert "rank 1 on b (exit code 9) failed first" in shown.text()
    cluster.wait_for_nothing_left()
    assert "failed (exit code 9)" in cluster.command("jobs", "--hosts", "a,b")


def train(cluster: Cluster, *words: str) -> str:
    """A task that has reached its first checkpoint; the name of its job."""
    name = cluster.launch(
        *("--procs", "1", "--port", "29600", *words, "digits", "--model.widths", "8"),
        *("--train.epochs", "5000", "--checkpoint.every_steps", "20", "--run", str(run(cluster))),
    )
    wait_for_checkpoints(cluster, 1)
    return name


def run(cluster: Cluster) -> Path:
    return cluster.folder / "run"


def newest_step(cluster: Cluster) -> int:
    folders = (run(cluster) / "checkpoints").glob("step-*")
    return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)


def wait_for_checkpoints(cluster: Cluster, more: int) -> None:
    target = newest_step(cluster) + 20 * more
    processes.wait_until(
        lambda: newest_step(cluster) >= target, f"step {target} is saved", timeout_s=120
    )


@pytest.mark.soak
def test_a_job_survives_reboots_and_is_stopped_with_a_checkpoint(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("a", "b")
    a, b = cluster.hosts
    name = train(cluster, "--lost-after", "5")
    for hosts in ((b,), (a,), (a, b)):
        step = newest_step(cluster)
        cluster.reboot(*hosts)
        wait_for_checkpoints(cluster, 2)
        assert newest_step(cluster) > step
        (run_log,) = [cluster.state_of(host, name) for host in hosts][:1]
        assert run_log["first_start"] >= 2

    assert "has saved and stopped" in cluster.command("stop", name, "--save", "--hosts", "b")
    cluster.wait_for_state(name, "ended", code=75)
    cluster.wait_for_nothing_left()
    assert cluster.command("attach", name, "--hosts", "a", code=75)
