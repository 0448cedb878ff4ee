"""`drumline doctor` on real hosts finds what is broken, and names the right one. Faults that do not
touch each other share a run: starting the doctor on every host is what costs time."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multinode import firewall, processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.sshd import SshDaemons

MakeTestbed = Callable[..., Testbed]
ROOT = Path(__file__).parents[2]
PORT = 29500
SKEWED = "import time\n_real = time.time\ntime.time = lambda: _real() + 3600.0\n"


class Clinic:
    """A testbed with ssh, and a Python for every host that a test can change on one of them."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.ssh = SshDaemons(bed)
        self.python = bed.folder / "python"
        self._write_python(self.python, {})

    def set_variables(self, host: Host, **variables: str) -> None:
        """Of the doctor's program on one host: hosts have mounts of their own, so the same path
        leads elsewhere."""
        other_folder = host.folder / "python"
        self._write_python(other_folder, variables)
        bind(host, other_folder, self.python)

    def _write_python(self, path: Path, variables: dict[str, str]) -> None:
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()
        )
        path.write_text(f'#!/bin/sh\n{exports}exec {shlex.quote(sys.executable)} "$@"\n')
        path.chmod(0o755)

    def examine(self, *flags: str, verb: str = "doctor") -> subprocess.CompletedProcess[str]:
        """From the first host, all of them."""
        return self.bed.hosts[0].run(*self._words(*flags, verb=verb), cwd=ROOT)

    def start(self, *flags: str) -> Job:
        return self.bed.hosts[0].start(*self._words(*flags), cwd=ROOT)

    def left(self) -> list[int]:
        """Programs of ours that run on the hosts."""
        return [
            pid
            for host in self.bed
            for pid in host.space.pids()
            if b"drumline" in command_line(pid)
        ]

    def _words(self, *flags: str, verb: str = "doctor") -> list[str]:
        """Variables of the test process that would choose for the hosts stay out."""
        names = ",".join(host.name for host in self.bed)
        ours = [f"--ssh=ssh -F {self.ssh.config}", f"--python={self.python}", f"--hosts={names}"]
        unset = [
            word
            for name in os.environ
            if name.startswith(("GLOO_", "NCCL_"))
            for word in ("-u", name)
        ]
        return ["env", *unset, sys.executable, "-m", "drumline", verb, *ours, *flags]

    def findings(self, *flags: str) -> tuple[int, dict[str, Any]]:
        done = self.examine("--json", "--no-collectives", *flags)
        assert done.stdout.startswith("{"), done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(name="clinic")
def make_clinic(make_testbed: MakeTestbed) -> Callable[..., Clinic]:
    return lambda *names: Clinic(make_testbed(*names))


def command_line(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def bind(host: Host, source: Path, target: Path) -> None:
    assert host.run("mount", "--bind", str(source), str(target)).returncode == 0


def told(result: dict[str, Any], check: str, level: str = "problem") -> dict[str, str]:
    """Where and what, of one check."""
    return {
        finding["where"]: finding["what"] + " | " + finding["fix"]
        for finding in result["findings"]
        if finding["check"] == check and finding["level"] == level
    }


def test_ports_names_a_host_that_is_down_and_a_wrong_interface(
    clinic: Callable[..., Clinic],
) -> None:
    here = clinic("a", "b", "c", "d")
    a, b, c, d = here.bed.hosts
    d.power_off()
    firewall.drop_port(a, PORT)
    firewall.close_all_but(b, 22)
    c.set_names({"a": a.address, "c": c.address, "d": d.address})
    a.add_interface("docker0", "172.17.0.1/16")
    here.set_variables(a, GLOO_SOCKET_IFNAME="docker0")
    code, result = here.findings()
    assert code == 3
    assert list(told(result, "host")) == ["d"]
    assert "down" in told(result, "host")["d"]
    assert list(told(result, "rendezvous port")) == ["a"]
    assert f"open TCP {PORT} on a" in told(result, "rendezvous port")["a"]
    assert list(told(result, "data ports")) == ["b"]
    assert "closed from every other host" in told(result, "data ports")["b"]
    assert "the other direction is open" in told(result, "data ports")["b"]
    assert list(told(result, "name")) == ["c -> b"]
    assert f"add `{b.address} b` to /etc/hosts on c" in told(result, "name")["c -> b"]
    assert list(told(result, "interface")) == ["a"]
    assert "gloo uses docker0 (172.17.0.1" in told(result, "interface")["a"]
    assert "export GLOO_SOCKET_IFNAME=eth0 on a" in told(result, "interface")["a"]


def test_slow_lines_black_holes_a_wrong_interface_and_what_differs_between_hosts(
    clinic: Callable[..., Clinic], tmp_path: Path
) -> None:
    here = clinic("a", "b", "c", "d")
    _, b, c, d = here.bed.hosts
    for host in here.bed:
        host.set_bandwidth(100 if host is b else 1000)
    firewall.drop_larger(c, 1300, but_port=22)
    d.add_interface("docker0", "172.17.0.1/16")
    code = tmp_path / "code"
    data = tmp_path / "data"
    for folder, file in ((code, "train.py"), (data, "samples.bin")):
        folder.mkdir()
        (folder / file).write_text("as it should be")
        other_folder = tmp_path / f"other-{folder.name}"
        other_folder.mkdir()
        (other_folder / file).write_text("something else")
    site = tmp_path / "site"
    clock = tmp_path / "clock"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "version.py").write_text('__version__ = "9.9.9"\n')
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(SKEWED)
    bind(b, tmp_path / "other-code", code)
    bind(c, tmp_path / "other-data", data)
    assert b.run("mount", "-o", "remount,size=16m", "/dev/shm").returncode == 0
    here.set_variables(c, PYTHONPATH=str(site))
    here.set_variables(d, PYTHONPATH=str(clock), GLOO_SOCKET_IFNAME="docker0")
    status, result = here.findings(f"--code={code}", f"--data={data}")
    assert status == 3
    assert list(told(result, "bandwidth")) == ["b"]
    assert "links from every other host carry" in told(result, "bandwidth")["b"]
    assert list(told(result, "mtu")) == ["c"]
    assert "packets of 1280 bytes pass" in told(result, "mtu")["c"]
    assert "sudo ip link set dev eth0 mtu 1280 on c" in told(result, "mtu")["c"]
    assert list(told(result, "interface")) == ["d"]
    assert "export GLOO_SOCKET_IFNAME=eth0 on d" in told(result, "interface")["d"]
    assert list(told(result, "code")) == ["b"]
    assert list(told(result, "shared memory")) == ["b"]
    assert list(told(result, "data")) == ["c"]
    assert list(told(result, "differences")) == ["c"]
    assert "torch differs across hosts" in told(result, "differences")["c"]
    assert "9.9.9 on c" in told(result, "differences")["c"]
    assert list(told(result, "clock")) == ["d"]
    assert "its clock is 3,600.0 s ahead of the other hosts'" in told(result, "clock")["d"]
    assert not told(result, "data ports")


@pytest.mark.soak
def test_a_security_group_that_lets_only_the_rendezvous_in_and_then_all_is_well(
    clinic: Callable[..., Clinic],
) -> None:
    here = clinic("a", "b")
    for host in here.bed:
        firewall.close_all_but(host, 22, PORT)
    done = here.examine("--no-collectives")
    assert done.returncode == 3, done.stdout + done.stderr
    assert (
        "problem: a <-> b: data ports closed both ways (no answer: packets are dropped"
        in done.stdout
    )
    assert "  fix: open TCP 1024-65535 on a and b for the job's hosts" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("result: not ready to train: 1 problem")
    for host in here.bed:
        firewall.lift(host)
    done = here.examine()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 links, 2 fine" in done.stdout
    assert "collectives: 2 ranks, all values right" in done.stdout
    assert "result: ready to train" in done.stdout
    killed = here.start()
    b = here.bed["b"]
    processes.wait_until(lambda: bool(b.find("RANK=1")), "a rank on b")
    b.freeze("RANK=1")  # so that it cannot end by itself
    killed.send(signal.SIGKILL)
    processes.wait_until(
        lambda: not here.left(), "the doctor's programs and ranks ended", timeout_s=20
    )


def test_tune_gives_one_set_of_variables_for_hosts_that_differ(
    clinic: Callable[..., Clinic],
) -> None:
    here = clinic("a", "b")
    a, b = here.bed.hosts
    b.space.configure(
        ["ip", "-batch", "-"],
        text="link set eth0 down\nlink set eth0 name ens5\nlink set ens5 up\n",
    )
    a.add_interface("docker0", "172.17.0.1/16")
    here.set_variables(a, GLOO_SOCKET_IFNAME="docker0")
    b.set_names({"a": a.address, "b": "127.0.1.1"})  # as Debian does
    here.set_variables(b, NCCL_P2P_DISABLE="1")
    done = here.examine(verb="tune")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "GLOO" in line or "NCCL" in line]
    assert lines == [
        'case "$(hostname)" in a) export GLOO_SOCKET_IFNAME=eth0;; esac  # gloo uses docker0 (172.17.0.1, '
        f"set by GLOO_SOCKET_IFNAME=docker0), which no other host reaches; eth0 ({a.address}) works",
        'case "$(hostname)" in b) export GLOO_SOCKET_IFNAME=ens5;; esac  # gloo uses lo (127.0.1.1), '
        f"which no other host reaches; ens5 ({b.address}) works",
        "unset NCCL_P2P_DISABLE  # b: NCCL_P2P_DISABLE=1: GPUs of this host copy through the CPU, many times slower",
    ]
    script = f"{done.stdout}\necho $GLOO_SOCKET_IFNAME ${{NCCL_P2P_DISABLE-unset}}"
    printed = [
        host.run("sh", "-c", script, env={"NCCL_P2P_DISABLE": "1"}).stdout for host in (a, b)
    ]
    assert printed == ["eth0 unset\n", "ens5 unset\n"]


def by_hand(host: Host, rank: int, *flags: str, env: dict[str, str] | None = None) -> Job:
    words = [
        "--nodes=4",
        f"--node-rank={rank}",
        "--master=a",
        "--wait=3",
        "--no-collectives",
        *flags,
    ]
    return host.start(sys.executable, "-m", "drumline", "doctor", *words, cwd=ROOT, env=env)


def test_by_hand_without_ssh(make_testbed: MakeTestbed) -> None:
    a, b, c = make_testbed("a", "b", "c").hosts
    first = by_hand(a, 0, "--json", env={"DRUMLINE_SECRET": "one of sixteen letters"})
    second = by_hand(b, 1, env={"DRUMLINE_SECRET": "one of sixteen letters"})
    third = by_hand(c, 2)
    assert first.wait() == second.wait() == 3
    assert third.wait() == 3
    assert (
        "node 0 refuses node 2: DRUMLINE_SECRET is set on node 0 and not on node 2" in third.text()
    )
    text = first.text()
    result = json.loads(text[text.index('{"result') :])
    assert told(result, "host").keys() == {"node 2", "node 3"}
    assert f"it did not connect to {a.address}:{PORT} within 3 s" in told(result, "host")["node 3"]
    assert "DRUMLINE_SECRET is set on node 0 and not on node 2" in told(result, "host")["node 2"]
    ways = {(edge["from"], edge["to"]): edge for edge in result["network"]["edges"]}
    assert (
        ways["a (node 0)", "b (node 1)"]["data"]
        == ways["b (node 1)", "a (node 0)"]["data"]
        == "open"
    )
    assert "node 1: result: not ready to train: " in second.text()
