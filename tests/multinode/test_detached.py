"""`drumline launch --detach` on real hosts: the job runs on without the laptop, and through reboots."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from drumline.launch.detached.job_folder import ENDED, JobState
from tests.multinode import processes
from tests.multinode.detached import Cluster
from tests.multinode.hosts import Testbed
from tests.unit.launch.test_detached_node import make_folder

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

    def make(
        *names: str,
        has_systemd: bool = True,
        prepare: Callable[[Testbed], Mapping[str, str]] = lambda _: {},
    ) -> Cluster:
        bed = make_testbed("laptop", *names, warm=True)
        lines = prepare(bed)
        cluster = Cluster(bed, tmp_path, has_systemd=has_systemd, sshd_lines=lines)
        (cluster.folder / "stay.py").write_text(STAY)
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


def test_a_job_runs_on_without_the_laptop(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster("a", "b")
    # Of a machine that is gone, with which this one shares the home folder.
    old = make_folder(cluster.state(cluster.hosts[0]) / "drumline", name="old", machine="c")
    old.write_state(JobState(state=ENDED))
    os.utime(old.path / "state.json", (1.0, 1.0))
    name = cluster.launch("--procs", "1", "--env", "TOKEN=hunter2", "stay.py")
    assert not old.path.parent.exists()
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
    assert f"detached; {name} continues" in shown.text()
    assert "was lost" not in shown.text()

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


@pytest.mark.soak
def test_a_job_is_stopped_with_a_save_between_two_starts_of_ranks(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("a", "b")
    a, b = cluster.hosts
    name = train(cluster, "--lost-after", "5")
    b.power_off()
    processes.wait_until(
        lambda: any("for node 1" in log.read_text() for log in cluster.folder.rglob("node-0.log")),
        "a waits for b, without ranks",
        timeout_s=60,
    )
    step = newest_step(cluster)
    text = cluster.command("stop", name, "--save", "--hosts", "a", code=3)
    assert "error: b: " in text
    assert cluster.state_of(a, name)["code"] == 130, "no rank was running that could save"

    cluster.reboot(b)
    text = cluster.command("stop", name, "--save", "--hosts", "a,b")
    assert "it was stopped without a save" in text
    cluster.wait_for_state(name, "ended", code=130)
    cluster.wait_for_nothing_left()
    train(cluster)
    assert newest_step(cluster) > step, "it has resumed"


@pytest.mark.soak
def test_without_systemd_a_job_runs_on_and_says_what_is_missing(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("a", "b", has_systemd=False)
    job = cluster.start(
        *("launch", "--detach", "--hosts", "a,b", "--procs", "1", "--max-restarts", "2", "stay.py")
    )
    assert job.wait() == 0, job.text()
    for host in "ab":
        assert f"warning: after a reboot of {host} the job does not start again" in job.text()
    (name,) = {name for nodes in cluster.jobs() for name in [next(iter(nodes.values()))["name"]]}
    cluster.wait_for_state(str(name), "running")

    b = cluster.bed["b"]
    shown = cluster.start("attach", str(name), "--hosts", "a")
    shown.wait_for("[b 1] rank 1 of 2")
    # Its agent and its rank, not the keeper.
    b.kill(f"DRUMLINE_JOB={cluster.state_of(b, str(name))['attempt']}")
    processes.wait_until(
        lambda: cluster.state_of(b, str(name))["first_start"] == 2,
        "b has started again",
        timeout_s=60,
    )
    shown.send(signal.SIGINT)
    assert shown.wait() == 0
    # A keeper that was killed takes its ranks with it; the job can still be stopped.
    a = cluster.bed["a"]
    keepers = [pid for pid in a.space.pids() if "detached.keeper" in processes.command(pid)]
    processes.send(keepers, signal.SIGKILL)
    processes.wait_until(lambda: "down on a" in cluster.command("jobs", "--hosts", "a,b"), "down")
    assert "it was stopped" in cluster.command("stop", str(name), "--hosts", "b")
    cluster.wait_for_state(str(name), "ended", code=130)
    cluster.wait_for_nothing_left()


@pytest.mark.soak
def test_a_host_that_is_rebooted_during_the_start_joins_later(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("a", "b")
    names = []
    for host in cluster.hosts:
        name = cluster.launch(*("--procs", "1", "--max-restarts", "2", "stay.py"))
        cluster.reboot(host)
        cluster.wait_for_state(name, "running")
        shown = cluster.start("attach", name, "--hosts", "a")
        shown.wait_for("[a 0] rank 0 of 2 on a")
        shown.wait_for("[b 1] rank 1 of 2 on b")
        assert "it was stopped" in cluster.command("stop", name, "--hosts", "a,b")
        assert shown.wait() == 130
        names.append(name)
    cluster.wait_for_nothing_left()
    listed = cluster.command("jobs", "--hosts", "a,b")
    assert all(f"{name}  stopped" in listed for name in names)


ALIASES = """
Host gpu-*
    ProxyJump jump
Host gpu-one
    HostName 10.77.0.3
    HostKeyAlias a
Host gpu-two
    HostName 10.77.0.4
    HostKeyAlias b
"""


@pytest.mark.soak
def test_hosts_have_aliases_behind_a_jump_host_and_differ(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("jump", "a", "b", has_systemd=False)
    for address in ("10.77.0.3", "10.77.0.4"):
        cluster.laptop.space.configure(["ip", "route", "add", "unreachable", f"{address}/32"])
    config = cluster.ssh.config
    config.write_text(ALIASES + config.read_text())
    other = cluster.folder.parent / "other code"
    other.mkdir()
    (other / "stay.py").write_text(STAY)
    folder = cluster.folder.parent / "other"
    folder.symlink_to(other)
    hosts = cluster.folder / "hosts"
    python = cluster.bed["b"].python
    hosts.write_text(f"gpu-one\ngpu-two user=root python={python} folder={folder} slots=2\n")
    flags = ("--hostfile", str(hosts), "--procs", "1")
    for code in (other, cluster.folder):
        (code / "finish").write_text("")
    assert "done; logs in" in cluster.command("launch", *flags, "stay.py")

    for code in (other, cluster.folder):
        (code / "finish").unlink()
    text = cluster.command("launch", "--detach", *flags, "stay.py")
    printed = text.partition("attach: drumline ")[2].splitlines()[0]
    assert f"--hostfile {hosts}" in printed
    shown = cluster.start(*shlex.split(printed))
    for line in (
        "[gpu-one 0] rank 0 of 3 on a",
        "[gpu-two 1] rank 1 of 3 on b",
        "[gpu-two 2] rank 2",
    ):
        shown.wait_for(line)
    for code in (other, cluster.folder):
        (code / "finish").write_text("")
    assert shown.wait() == 0


@pytest.mark.soak
def test_every_line_is_an_object_on_hosts_and_where_it_is_attached(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster("a", "b", has_systemd=False)
    words = ("--model.widths", "4", "--train.steps", "12", "--log.format", "json", "--run", "run")
    launched = cluster.command(
        *("launch", "--detach", "--hosts", "a,b", "--procs", "1", "digits", *words)
    )
    messages = [json.loads(line)["message"] for line in launched.splitlines()]
    (name,) = [message.split()[3] for message in messages if message.startswith("attach: ")]

    attached = cluster.command("attach", name, "--hosts", "a")
    on_hosts = [path.read_text() for path in cluster.folder.rglob("node-*.jsonl")]
    for text in (attached, "".join(on_hosts)):
        objects = [json.loads(line) for line in text.splitlines()]
        (step,) = [line for line in objects if line.get("event") == "train"]
        assert (step["host"], step["rank"], step["step"]) == ("a", 0, 10)
    assert f"done; logs in {cluster.folder}" in json.loads(attached.splitlines()[-1])["message"]


def only_ipv6(bed: Testbed) -> dict[str, str]:
    """All hosts get an IPv6 address beside the other."""
    for number, host in enumerate(bed, start=1):
        host.space.configure(["ip", "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"])
    return {
        host.name: f"\nListenAddress fd77::{number}" for number, host in enumerate(bed, start=1)
    }


@pytest.mark.soak
def test_hosts_without_ipv4(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster("a", "b", has_systemd=False, prepare=only_ipv6)
    for host in cluster.hosts:
        host.space.configure(["ip", "address", "del", f"{host.address}/24", "dev", "eth0"])
    config = cluster.ssh.config
    names = "Host fd77::2\n    HostKeyAlias a\nHost fd77::3\n    HostKeyAlias b\n"
    config.write_text(names + config.read_text())
    (cluster.folder / "finish").write_text("")
    text = cluster.command(
        "launch", "--hosts", "[fd77::2],root@[fd77::3]:2", "--procs", "1", "stay.py"
    )
    assert "[fd77::3 2] rank 2 of 3 on b" in text
