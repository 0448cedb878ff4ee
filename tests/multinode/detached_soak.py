"""Random deaths of detached jobs: does each end as it should, and is nothing left?

    python -m tests.multinode.detached_soak --count 100 --seed 0          (make soak-detach)

Each round launches a task on two hosts, and then one thing happens at a random time: a host or both are
rebooted, an agent, a rank or a keeper is killed, or nothing. The job is stopped with a save, or without, or
it ends by itself. A job that reports a save must have saved. Afterwards no process, unit, port or folder in
/dev/shm may be left on the hosts.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.multinode import needs, processes
from tests.multinode.detached import Cluster
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job

EVENTS = ("nothing", "reboot", "reboot both", "kill agent", "kill rank", "kill keeper")
ENDS = ("done", "stop", "stop --save")
PORT = 29500
# How long a job may show no progress, and a command may take, on a machine that does other work too.
STUCK_S = 180.0


def strike(cluster: Cluster, name: str, event: str, host: Host) -> None:
    if event == "reboot":
        cluster.reboot(host)
    elif event == "reboot both":
        cluster.reboot(*cluster.hosts)
    elif event != "nothing":
        words = {
            "kill agent": "agent_process",
            "kill rank": "drumline train",
            "kill keeper": "keeper",
        }
        pids = [pid for pid in host.space.pids() if words[event] in processes.command(pid)]
        processes.send(pids[:1], 9)


def wait_while_it_proceeds(cluster: Cluster, name: str, shown: Job) -> None:
    """Beside other work a step may take seconds."""

    def progress() -> list[object]:
        states = [cluster.state_of(host, name) for host in cluster.hosts]
        return [(state["first_start"], state["reached_step"]) for state in states]

    while shown.is_running():
        before = progress()
        processes.wait_until(
            lambda before=before: not shown.is_running() or progress() != before,
            f"progress of {name}:\n{shown.text()}",
            timeout_s=STUCK_S,
        )


def play(cluster: Cluster, chance: random.Random, number: int) -> str:
    """One round; what went wrong, or nothing."""
    event = chance.choice(EVENTS)
    end = chance.choice(ENDS)
    host = chance.choice(cluster.hosts)
    run = cluster.folder / f"run-{number}"
    steps = "80" if end == "done" else "1000000"
    name = cluster.launch(
        *("--procs", "1", "--lost-after", "5", "--max-restarts", "5", "digits"),
        *("--model.widths", "4", "--train.steps", steps, "--checkpoint.every_steps", "20"),
        *("--run", str(run)),
    )
    time.sleep(chance.uniform(0.0, 15.0))
    strike(cluster, name, event, host)
    time.sleep(chance.uniform(0.0, 10.0))
    codes = {0, 75, 130}
    if end == "done":
        codes = {0}
        shown = cluster.start("attach", name, "--hosts", cluster.names)
        wait_while_it_proceeds(cluster, name, shown)
    else:
        words = end.replace("stop", f"stop {name}").split()
        cluster.command(*words, "--hosts", cluster.names, timeout_s=STUCK_S)
    states = [cluster.state_of(peer, name) for peer in cluster.hosts]
    problem = ""
    if any(state["state"] != "ended" or state["code"] not in codes for state in states):
        problem = f"ended as {states}"
    if any(state["code"] == 75 for state in states) and not (run / "preempted.json").exists():
        problem = f"saved nothing, and ended as {states}"
    try:
        cluster.wait_for_nothing_left()
    except AssertionError as error:
        problem = f"{problem} {error}"
    for peer in cluster.hosts:
        if f":{PORT} " in peer.run("ss", "-tln").stdout:
            problem += f" port {PORT} of {peer}"
    shutil.rmtree(run, ignore_errors=True)
    words = f"round {number}: {event} on {host.name}, {end}"
    print(f"{words}: {problem or 'well'}", flush=True)
    return problem


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := needs.missing():
        print(reason)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it made is taken down
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    cluster = Cluster(Testbed(folder / "testbed", ["laptop", "a", "b"], warm=True), folder)
    try:
        problems = [play(cluster, chance, number) for number in range(options.count)]
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    failed = sum(map(bool, problems))
    print(f"{options.count - failed} of {options.count} rounds ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
