"""The testbed: hosts are isolated, faults affect only their target, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import firewall, needs, processes
from tests.multinode.hosts import Testbed
from tests.multinode.sshd import SshDaemons
from tests.multinode.talk import answers, call, seconds, serve

MakeTestbed = Callable[..., Testbed]
ROOT = Path(__file__).parents[2]

# One number every few milliseconds over one connection; the other end writes down what arrives.
TALK = """
import itertools, socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    for number in itertools.count():
        connection.sendall(f"{number}\\n".encode())
        time.sleep(0.01)
"""
LISTEN = """
import socket
listener = socket.create_server(("", 5000))
print("ready", flush=True)
for line in listener.accept()[0].makefile():
    print(line, end="", flush=True)
"""
# One packet, without a connection.
HEAR = """
import socket
listener = socket.socket(type=socket.SOCK_DGRAM)
listener.bind(("", 5000))
print("ready", flush=True)
print(listener.recv(100))
"""
SAY = """
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(b"hello", (sys.argv[1], 5000))
"""


def test_hosts_are_apart_and_know_each_other_by_name(make_testbed: MakeTestbed) -> None:
    bed = make_testbed("a", "b", shm="16m")
    a, b = bed.hosts
    assert [host.run("hostname").stdout for host in bed] == ["a\n", "b\n"]
    assert os.uname().nodename not in ("a", "b")
    serve(b, 5000)
    assert answers(a, b, 5000)
    assert call(b, a, 5000) == "refused", "the ports of one host are not those of the other"
    assert a.run("ls", "/sys/class/net").stdout.split() == ["eth0", "lo"]
    assert len(a.run("sh", "-c", "echo /proc/[0-9]*").stdout.split()) == 2, (
        "sleep, and the shell itself"
    )
    assert (
        os.statvfs(f"/proc/{a.space.pid}/root/dev/shm").f_blocks * os.statvfs("/").f_frsize
        == 16 << 20
    )


def test_a_host_has_no_way_to_the_machine(make_testbed: MakeTestbed) -> None:
    (a,) = make_testbed("a").hosts
    assert a.run("ip", "route").stdout.split()[:3] == ["10.77.0.0/24", "dev", "eth0"]
    assert "default" not in a.run("ip", "route").stdout


def test_a_host_may_have_a_network_that_leads_nowhere(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a-name-that-is-too-long-for-a-link.example", "b").hosts
    a.add_interface("docker0", "172.17.0.1/16")
    assert a.run("ls", "/sys/class/net").stdout.split() == ["docker0", "eth0", "lo"]
    serve(a, 5000)
    assert answers(b, a, 5000)
    assert a.run("hostname").stdout.strip() == a.name


def test_names_can_be_taken_away(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a", "b").hosts
    assert a.run("getent", "hosts", "b").stdout.split() == [b.address, "b"]
    a.set_names({"a": a.address})
    assert a.run("getent", "hosts", "b").returncode != 0
    assert b.run("getent", "hosts", "b").returncode == 0


def test_a_command_says_how_it_ended(make_testbed: MakeTestbed, tmp_path: Path) -> None:
    (a,) = make_testbed("a").hosts
    done = a.run(
        "sh",
        "-c",
        "pwd; cat; echo $COLOUR >&2; exit 7",
        env={"COLOUR": "red"},
        cwd=tmp_path,
        text="in",
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path}\nin", "red\n")
    job = a.start("sh", "-c", "echo begun; exec sleep 1000")
    job.wait_for("begun")
    assert job.is_running()
    job.send(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM
    with pytest.raises(
        AssertionError, match="ended with 0, without 'never'; it wrote:\nsomething else"
    ):
        a.start("echo", "something else").wait_for("never")
    with pytest.raises(subprocess.TimeoutExpired):
        a.run("sleep", "1000", timeout_s=0.2)
    processes.wait_until(lambda: not a.space.pids(), "the end of the command that took too long")


@pytest.mark.soak
def test_what_a_firewall_drops_gets_no_answer(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a", "b").hosts
    for host in (a, b):
        serve(host, 5000, 5001)
    firewall.drop_port(b, 5000)
    assert call(a, b, 5000) == "silence"
    assert answers(a, b, 5001)
    assert answers(b, b, 5000), "a host may always talk to itself"
    firewall.lift(b)

    # As a security group does it: one way.
    firewall.close_all_but(b, 5000)
    assert answers(a, b, 5000)
    assert call(a, b, 5001) == "silence"
    assert answers(b, a, 5001), "answers to what the host itself has begun are let in"
    firewall.close_all_but(a, 5000)
    assert call(b, a, 5001) == "silence"
    for host in (a, b):
        firewall.lift(host)

    firewall.drop_everything(b)
    assert call(a, b, 5000) == "silence"
    assert call(b, a, 5000) == "silence"
    assert answers(b, b, 5000)
    firewall.lift(b)

    firewall.drop_larger(b, 600)
    assert answers(a, b, 5000, num_bytes=100)
    assert call(a, b, 5000, num_bytes=5000) == "silence"
    firewall.lift(b)
    assert answers(a, b, 5000, num_bytes=5000)


def test_packets_can_be_lost_on_one_way_only(make_testbed: MakeTestbed) -> None:
    a, b, c = make_testbed("a", "b", "c").hosts
    serve(b, 5000)
    firewall.drop_from(b, a)
    assert call(a, b, 5000) == "silence"
    assert answers(c, b, 5000)
    listener = a.start(sys.executable, "-IS", "-c", HEAR)
    listener.wait_for("ready")
    assert b.run(sys.executable, "-IS", "-c", SAY, "a").returncode == 0
    assert listener.wait() == 0, "the way back is open"
    assert "hello" in listener.text()


def test_bandwidth_and_mtu_of_a_link(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a", "b").hosts
    serve(b, 5000)
    num_bytes = 1 << 20
    free = seconds(a, b, num_bytes)
    b.set_bandwidth(10)
    limited = seconds(a, b, num_bytes)
    b.set_bandwidth(None)
    free_again = seconds(a, b, num_bytes)
    assert limited > 3 * max(free, free_again), (free, limited, free_again)

    b.set_mtu(700)
    assert [host.run("cat", "/sys/class/net/eth0/mtu").stdout for host in (a, b)] == [
        "1500\n",
        "700\n",
    ]
    assert answers(a, b, 5000, num_bytes=5000), "a small MTU is known to the host, and works"


def test_a_cut_link_gives_no_answer_and_a_restored_one_works(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a", "b").hosts
    listener = b.start(sys.executable, "-IS", "-c", LISTEN)
    listener.wait_for("ready")
    talker = a.start(sys.executable, "-IS", "-c", TALK, "b")
    listener.wait_for("\n10\n")
    b.cut()
    time.sleep(0.1)  # what had arrived already is written down
    heard = listener.text()
    time.sleep(0.4)
    assert listener.text() == heard
    assert talker.is_running()
    assert listener.is_running()
    b.restore()
    listener.wait_for(f"\n{heard.count(chr(10)) + 10}\n")
    numbers = listener.text().split()[1:-1]
    assert numbers == [str(number) for number in range(len(numbers))], "nothing was lost on the way"


def test_freezing_and_killing_hit_those_with_the_marker(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a", "b").hosts
    script = "RANK=1 setsid sleep 1000 & RANK=0 setsid sleep 1000 & echo begun; wait"
    for host in (a, b):
        host.start("sh", "-c", script).wait_for("begun")
        processes.wait_until(
            lambda host=host: len(host.find("RANK=1") + host.find("RANK=0")) == 2, "two"
        )
    (frozen,) = a.freeze("RANK=1")
    processes.wait_until(
        lambda: processes.stat_fields(frozen)[0] == "T", "a process that stands still"
    )
    others = a.find("RANK=0") + b.find("RANK=1")
    assert len(others) == 2
    assert "T" not in [processes.stat_fields(pid)[0] for pid in others]
    a.thaw("RANK=1")
    processes.wait_until(lambda: processes.stat_fields(frozen)[0] == "S", "a process that goes on")
    a.freeze("RANK=1")
    a.kill("RANK=1")
    processes.wait_until(lambda: not a.find("RANK=1"), "the end of the killed one")
    assert len(a.find("RANK=0")) == len(b.find("RANK=1")) == 1
    with pytest.raises(AssertionError, match="no process on a has RANK=1 in its environment"):
        a.kill("RANK=1")


def test_a_job_that_was_frozen_still_reports_its_end(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    (a,) = make_testbed("a").hosts
    # Each is asleep before it is frozen; the first one ends by itself once it is told to.
    script = f"echo asleep; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    jobs = {
        word: a.start("sh", "-c", script, env={"JOB": word})
        for word in ("thawed", "killed", "left")
    }
    for word, job in jobs.items():
        job.wait_for("asleep")
        a.freeze(f"JOB={word}")
    (tmp_path / "go").touch()
    a.thaw("JOB=thawed")
    a.kill("JOB=killed")
    assert jobs["thawed"].wait() == 0
    assert jobs["killed"].wait() == -signal.SIGKILL
    assert jobs["left"].is_running()  # the fixture ends it


def test_a_host_goes_down_and_is_restored(make_testbed: MakeTestbed) -> None:
    a, b = make_testbed("a", "b").hosts
    job = serve(b, 5000)
    assert answers(a, b, 5000)
    b.power_off()
    assert job.wait() == -signal.SIGKILL
    with pytest.raises(AssertionError, match="b is off"):
        b.run("true")
    assert call(a, b, 5000) == "silence"
    b.power_on()
    assert call(a, b, 5000) == "refused"
    serve(b, 5000)
    assert answers(a, b, 5000)


@pytest.mark.soak
def test_ssh_runs_a_command_on_another_host(make_testbed: MakeTestbed) -> None:
    bed = make_testbed("a", "b")
    ssh = SshDaemons(bed)
    done = bed["a"].run(*ssh.command("b", "hostname; cat; exit 5"), text="through stdin")
    assert (done.returncode, done.stdout, done.stderr) == (5, "b\nthrough stdin", "")
    assert bed["b"].run(*ssh.command(bed["a"].address, "hostname")).stdout == "a\n"
    # The key of another host than the one that was asked for is refused, without a question.
    bed["a"].set_names({"a": bed["a"].address, "b": bed["a"].address})
    impostor = bed["a"].run(*ssh.command("b", "hostname"))
    assert impostor.returncode == 255
    assert "Host key verification failed" in impostor.stderr
    bed["b"].power_off()
    bed["b"].power_on()
    ssh.serve(bed["b"])
    assert bed["b"].run(*ssh.command("b", "hostname")).stdout == "b\n"


def traces_on_the_machine() -> dict[str, object]:
    """What a testbed could leave behind, as far as it lasts."""
    links = subprocess.run(
        [needs.tool("ip"), "-brief", "link"], capture_output=True, text=True, check=True
    )
    mine = f"{processes.OWNER_VARIABLE}={processes.owner_name(os.getpid())}"
    return {
        "links": re.findall(r"^\S+", links.stdout, re.MULTILINE),
        "mounts": Path("/proc/self/mounts").read_text(),
        "named namespaces": [str(path) for path in Path("/run").glob("netns/*")],
        "processes": [pid for pid in processes.everyone() if mine in processes.environment(pid)],
        "hostname": os.uname().nodename,
    }


def test_nothing_is_left(make_testbed: MakeTestbed) -> None:
    before = traces_on_the_machine()
    bed = make_testbed("a", "b")
    spaces = {
        processes.namespace(host.space.pid, kind) for host in bed for kind in ("mnt", "pid", "uts")
    }
    assert len(spaces) == 6
    # Held, so that the kernel does not give their numbers to the testbed of a test beside this one.
    held = [
        os.open(f"/proc/{host.space.pid}/ns/{kind}", os.O_RDONLY)
        for host in bed
        for kind in ("mnt", "pid", "uts")
    ]
    SshDaemons(bed)
    bed["a"].start(
        "sh", "-c", "trap '' TERM HUP; setsid sleep 1000 & sleep 1000", env={"JOB": "stubborn"}
    )
    firewall.drop_everything(bed["a"])
    bed["b"].cut()
    assert traces_on_the_machine()["processes"] != before["processes"]
    bed.close()
    bed.close()
    assert traces_on_the_machine() == before
    in_use = {
        processes.namespace(pid, kind)
        for pid in processes.everyone()
        for kind in ("mnt", "pid", "uts")
    }
    for descriptor in held:
        os.close(descriptor)
    assert not spaces & in_use


def test_nothing_is_left_when_the_test_process_is_killed(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tests.multinode.hosts import Testbed
from tests.multinode.processes import owner_name
bed = Testbed(Path({str(tmp_path / "doomed")!r}), ["a", "b"])
bed["a"].start("setsid", "sleep", "1000")
print(*(host.space.pid for host in bed), *bed["a"].space.pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = {int(word) for word in done.stdout.split()}
    assert len(pids) >= 2
    states = lambda: [processes.stat_fields(pid)[:1] for pid in pids]  # noqa: E731
    processes.wait_until(
        lambda: all(state in ([], ["Z"]) for state in states()), "the end of all on the hosts"
    )


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not(
    make_testbed: MakeTestbed,
) -> None:
    here = processes.namespace("self", "pid")
    alive = processes.owner_name(os.getpid())
    number, start, _ = alive.split(".", 2)
    owners = {
        "dead": f"{number}.{int(start) - 1}.{here}",  # the number is in use again
        "alive": alive,
        "elsewhere": f"{number}.{int(start) - 1}.pid:[1]",
        "not ours": "yes",
    }
    sleepers = {
        name: subprocess.Popen(["sleep", "1000"], env={processes.OWNER_VARIABLE: owner})
        for name, owner in owners.items()
    }
    try:
        make_testbed("a")
        assert sleepers["dead"].wait(5) == -signal.SIGKILL
        assert [name for name, sleeper in sleepers.items() if sleeper.poll() is None] == list(
            owners
        )[1:]
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()


def test_a_testbed_that_cannot_be_made_says_why_and_leaves_nothing(
    make_testbed: MakeTestbed,
) -> None:
    before = traces_on_the_machine()
    with pytest.raises(RuntimeError, match=r"a did not come up: .*mount"):
        make_testbed("a", shm="nonsense")
    assert traces_on_the_machine() == before


def test_the_reason_to_skip_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(needs, "SEARCH_PATH", str(tmp_path))
    for name in needs.TOOLS.keys() - {"nft", "sshd"}:
        (tmp_path / name).touch(mode=0o755)
    reason = "hosts on one machine need root, nft (apt-get install nftables), sshd (apt-get install openssh-server)"
    assert needs.missing.__wrapped__() == reason
    for name in needs.SLURM_TOOLS.keys() - {"munged", "slurmd"}:
        (tmp_path / name).touch(mode=0o755)
    reason = "a Slurm cluster on one machine needs munged (apt-get install munge), slurmd (apt-get install slurm-wlm)"
    assert needs.missing_slurm.__wrapped__() == reason


def test_what_is_installed_is_what_is_needed() -> None:
    pairs = re.findall(
        r"\b([a-z-]+):([a-z0-9-]+)", (Path(__file__).parent / "install.sh").read_text()
    )
    assert dict(pairs) == needs.TOOLS | needs.SLURM_TOOLS | needs.BROWSER | needs.PROMETHEUS
