"""Every socket that a command listens on, from its start to its end: at which address, and in which
range of ports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.sshd import SshDaemons
from tests.ports import listening

MakeTestbed = Callable[..., Testbed]
PORT = 29500
FREE_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
LOOPBACK = "127.0.0.1"
LOOK_S = 0.01
TASK = "digits --model.widths 4 --train.steps 2 --train.batch_size 32 --run run"
SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


@contextmanager
def observed(hosts: Sequence[Host]) -> Iterator[dict[str, set[tuple[str, int]]]]:
    """What listens on each host meanwhile, looked at again and again; its sshd is not counted."""
    before = {host.name: listening(host.space.pid) for host in hosts}
    ports: dict[str, set[tuple[str, int]]] = {host.name: set() for host in hosts}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            for host in hosts:
                ports[host.name] |= listening(host.space.pid) - before[host.name]

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield ports
    finally:
        is_over.set()
        looking.join()


def drumline(host: Host, words: str, folder: Path, network: str, ssh: str = "ssh") -> Job:
    variables = {"PYTHONPATH": str(Path.cwd()), "GLOO_SOCKET_IFNAME": network, "DRUMLINE_SSH": ssh}
    return host.start(host.python, "-m", "drumline", *words.split(), cwd=folder, env=variables)


def check_ports(seen: set[tuple[str, int]], *more: int) -> None:
    low, high = map(int, Path(FREE_PORTS).read_text().split())
    assert all(port in more or low <= port <= high for _, port in seen), seen


def test_one_machine_listens_on_the_loopback_or_not_at_all(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    (host,) = make_testbed("a", warm=True).hosts
    (tmp_path / "script.py").write_text(SCRIPT)
    on_loopback = (
        f"train {TASK} --procs 2",
        "launch --procs 2 script.py",
        "launch --watch --procs 2 script.py",
        "doctor --collectives --procs 2",
    )
    for words in on_loopback:
        with observed([host]) as seen:
            job = drumline(host, words, tmp_path, "lo")
            code = job.wait()
        assert words.startswith("doctor") or code == 0, job.text()
        assert {address for address, _ in seen["a"]} == {LOOPBACK}, words
        check_ports(seen["a"])
    readers = (
        f"train {TASK}-alone",
        "verify run",
        "report run",
        "watch run --once",
        "lint script.py",
        "doctor",
    )
    with observed([host]) as seen:
        jobs = {words: drumline(host, words, tmp_path, "lo") for words in readers}
        for words, job in jobs.items():
            assert job.wait() == 0 or words == "doctor", job.text()
    assert not seen["a"]


def test_nodes_by_hand_listen_at_their_own_addresses(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    bed = make_testbed("a", "b", warm=True)
    launch = f"launch --nodes 2 --master {bed['a'].address}:{PORT} --procs 1"
    doctor = f"doctor --nodes 2 --master {bed['a'].address}:{PORT} --no-collectives"
    for words in (f"{launch} --node-rank {{rank}} {TASK}", f"{doctor} --node-rank {{rank}}"):
        with observed(bed.hosts) as seen:
            jobs = [
                drumline(host, words.format(rank=rank), tmp_path, "eth0")
                for rank, host in enumerate(bed.hosts)
            ]
            codes = [job.wait() for job in jobs]
        assert words.startswith("doctor") or codes == [0, 0], [job.text() for job in jobs]
        check_nodes(bed, seen)


@pytest.mark.soak
def test_hosts_over_ssh_listen_at_their_own_addresses(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    bed = make_testbed("a", "b", warm=True)
    hosts = "--hosts a,b"
    ssh = f"ssh -F {SshDaemons(bed).config}"
    for words in (f"launch {hosts} --procs 1 {TASK}", f"doctor {hosts} --no-collectives"):
        with observed(bed.hosts) as seen:
            job = drumline(bed["a"], words, tmp_path, "eth0", ssh)
            code = job.wait()
        assert words.startswith("doctor") or code == 0, job.text()
        check_nodes(bed, seen)


def check_nodes(bed: Testbed, seen: dict[str, set[tuple[str, int]]]) -> None:
    for host in bed:
        assert seen[host.name], "a command that was not observed shows nothing"
        assert {address for address, _ in seen[host.name]} <= {host.address, LOOPBACK}, seen
        check_ports(seen[host.name], PORT)
