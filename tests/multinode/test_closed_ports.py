"""A connection between hosts that is closed from the start, or lost later, ends the job on all of
them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import firewall
from tests.multinode.hosts import Testbed
from tests.multinode.test_ssh_launch import Desk

DROPPED = r"\(no answer: packets are dropped, as a security group or firewall does it\)"


@pytest.mark.soak
def test_a_closed_port_and_a_lost_host_end_the_job(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    bed = make_testbed("a", "b")
    desk = Desk(bed, tmp_path)
    (tmp_path / "stay.py").write_text("import time\ntime.sleep(600)\n")
    firewall.close_all_but(bed["a"], 22, 29501)
    hosts = ("--hosts", "a,b", "--procs", "1")
    # The one cannot reach the rendezvous port, the other nothing else; ranks of a script could not
    # tell why they wait.
    rendezvous = desk.launch(*hosts, "stay.py")
    data = desk.launch(*hosts, "--port", "29501", "--watch", "stay.py")
    # All of them wait for 20 s: on other hosts the next one does so meanwhile.
    (tmp_path / "other").mkdir()
    with Testbed(tmp_path / "other-testbed", ["a", "b", "c"], warm=True) as other:
        _lose_hosts(Desk(other, tmp_path / "other"))
    assert [rendezvous.wait(120), data.wait(120)] == [3, 3], rendezvous.text() + data.text()
    assert re.search(
        rf"drumline: the job failed on b \(exit code 3\):\n"
        rf"  drumline: error: the rendezvous port 29500 is closed from b to a {DROPPED}\n"
        r"    try: open TCP 29500 on a to the job's hosts\n"
        r"drumline: logs in .* on each host\n$",
        rendezvous.text(),
    ), rendezvous.text()
    assert rendezvous.text().count("[b] drumline: waiting for the first node") <= 2
    assert re.search(
        r"drumline: the job failed on [ab] \(exit code 3\):\n"
        r"  drumline: error: b cannot reach a's data port \d+ at [^:]+: no answer: packets are dropped, .*\n"
        r"    try: open all TCP ports between the nodes \(in AWS: .*\), on a\n",
        data.text(),
    ), data.text()
    for job in (rendezvous, data):
        assert job.text().count(" error: ") == 1, job.text()


def _lose_hosts(desk: Desk) -> None:
    job, marker = desk.sleepers("--grace", "2", "--lost-after", "4", "--no-standby")
    b = desk.bed["b"]
    c = desk.bed["c"]
    b.cut()
    c.power_off()
    desk.wait_for_none(marker, desk.bed["a"], b)
    assert job.wait() == 1
    assert "drumline: error: the connection to b was lost: " in job.text()
    assert "drumline: error: the connection to c was lost: " in job.text()
    (logs,) = (desk.folder / "runs" / "launch").iterdir()
    log = (logs / "node-1.log").read_text()
    # Its supervisor and its agent notice at the same time.
    is_ended = "drumline: no heartbeat of the launcher for 13 s\n" in log
    assert is_ended or "is lost or unreachable" in log, log
