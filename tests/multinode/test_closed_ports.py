"""Hosts that ssh reaches, with a closed way between them: the job ends by itself, with the edge and the rule to add."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.multinode import firewall
from tests.multinode.hosts import Testbed
from tests.multinode.test_ssh_launch import Desk

DROPPED = r"\(no answer: packets are dropped, as a security group or firewall does it\)"


def test_a_closed_way_ends_the_job_with_the_edge_and_the_rule(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    bed = make_testbed("a", "b")
    desk = Desk(bed, tmp_path)
    (tmp_path / "stay.py").write_text("import time\ntime.sleep(600)\n")
    firewall.close_all_but(bed["a"], 22, 29501)
    hosts = ("--hosts", "a,b", "--procs", "1")
    # The one cannot reach the rendezvous port, the other nothing else; ranks of a script could not tell why they wait.
    rendezvous = desk.launch(*hosts, "stay.py")
    data = desk.launch(*hosts, "--port", "29501", "--watch", "stay.py")
    assert [rendezvous.wait(120), data.wait(120)] == [3, 3], rendezvous.text() + data.text()
    assert re.search(
        rf"drumline: the job failed on b \(exit code 3\):\n"
        rf"  drumline: error: the rendezvous port 29500 is closed from b to a {DROPPED}\n"
        r"    next: open TCP 29500 on a to the job's hosts\n"
        r"drumline: logs in .* on each host\n$",
        rendezvous.text(),
    ), rendezvous.text()
    assert rendezvous.text().count("[b] drumline: waiting for the first node") <= 2
    assert re.search(
        rf"drumline: the job failed on [ab] \(exit code 3\):\n"
        rf"  drumline: error: data ports are closed from b to a: port \d+ {DROPPED}\n"
        r"    next: open TCP 1024-65535 on a for the job's hosts \(AWS: .*\)\n",
        data.text(),
    ), data.text()
    for job in (rendezvous, data):
        assert job.text().count(" error: ") == 1, job.text()
