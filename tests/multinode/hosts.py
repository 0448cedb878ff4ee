"""Real hosts on one machine: each has its own network, name, /etc/hosts, process numbers, /dev/shm,
/sys and /run.

    def test_two_hosts(make_testbed):                      # the fixture in conftest.py; skips where it cannot work
        bed = make_testbed("a", "b")                       # or: with Testbed(folder, ["a", "b"]) as bed
        a, b = bed.hosts
        a.run("hostname")                                  # foreground: CompletedProcess with text
        job = b.start(sys.executable, "serve.py", env={"GLOO_SOCKET_IFNAME": "eth0"})  # background: a Job
        job.wait_for("ready"); job.wait()                  # act on what it says; its exit code
        b.freeze("RANK=1"); b.thaw("RANK=1"); b.kill("RANK=1")   # processes by a word of their environment
        b.set_clock(-20)                                   # what it starts from then on is 20 s behind; again: it jumps
        b.cut(); b.restore(); b.set_bandwidth(100); b.set_mtu(1400); b.set_names({"a": "10.77.0.1"})
        firewall.drop_port(b, 5000); firewall.lift(b)      # firewall.py has them all
        ssh = SshDaemons(bed); a.run(*ssh.command("b", "hostname"))    # sshd.py
        b.power_off(); b.power_on()                        # every process of the host ends at once
        make_testbed("a", warm=True).hosts[0].python       # a Python that has torch already: warm_host.py

All hosts hang on one bridge that has a network namespace of its own. So there is no way from a host
to the machine's network or back: nothing can be reached by mistake, addresses cannot collide with a
route, and two testbeds do not see each other. A test that wants to talk to a host does so from
another host. The file system is shared, apart from what is named above.
"""

from __future__ import annotations

import atexit
import contextlib
import shlex
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.multinode import processes
from tests.multinode.clock import set_clock
from tests.multinode.job import Job, end
from tests.multinode.space import Space, variables
from tests.multinode.warm_host import PROGRAM, WarmHost

FIRST_ADDRESS = "10.77.0."
# A reverse look-up by any other way than the file would leave the host, and c10d waits long for it.
NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
# /sys tells about the network of whoever mounts it; the control groups below it are put back.
PREPARE = """
echo {name} > /proc/sys/kernel/hostname
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/nsswitch.conf /etc/nsswitch.conf
mount -t tmpfs -o size={shm} tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/cgroup /run/sshd
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup /sys/fs/cgroup
"""


class Host:
    """One machine of a testbed; made by it."""

    def __init__(
        self, name: str, address: str, folder: Path, switch: Space, *, shm: str, warm: bool
    ) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._switch = switch
        self._is_warm = warm
        self._server: WarmHost | None = None
        self.python = str(PROGRAM) if warm else sys.executable
        self._port = f"port-{address.rpartition('.')[2]}"
        self._jobs: list[Job] = []
        self._clock: dict[str, str] = {}
        folder.mkdir(parents=True)
        (folder / "hosts").touch()
        (folder / "nsswitch.conf").write_text(NSSWITCH)
        self._prepare = PREPARE.format(
            name=shlex.quote(name), folder=shlex.quote(str(folder)), shm=shm
        )
        self.power_on()

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address})"

    def power_on(self) -> None:
        """As it was when the testbed was made, without firewall and limits; nothing runs on it."""
        self.space = Space(self.name, self._prepare)
        try:
            self._plug_in()
            if self._is_warm:
                self._server = WarmHost(self.space.pid)
                self.space.apart.update(self._server.pids())
        except BaseException:
            self.space.close()
            raise

    def _plug_in(self) -> None:
        # The others remember a host by its hardware address; it has the same one when it comes
        # back.
        hardware = f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"
        pair = f"link add {self._port} type veth peer name eth0 address {hardware} netns {self.space.pid}\n"
        self._switch.configure(
            ["ip", "-batch", "-"],
            text=f"{pair}link set {self._port} master bridge addrgenmode none up\n",
        )
        self.space.configure(
            ["ip", "-batch", "-"],
            text=f"link set lo up\naddress add {self.address}/24 dev eth0\nlink set eth0 addrgenmode none up\n",
        )

    def set_names(self, addresses: Mapping[str, str]) -> None:
        """What this host knows the others (and itself) by: its /etc/hosts."""
        lines = [
            f"{address} {name}" for name, address in {"localhost": "127.0.0.1", **addresses}.items()
        ]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def add_interface(self, name: str, address: str) -> None:
        """A second network that leads nowhere, such as docker0 with 172.17.0.1/16: the wrong one to
        choose."""
        self.space.configure(
            ["ip", "-batch", "-"],
            text=f"link add {name} type bridge\naddress add {address} dev {name}\nlink set {name} up\n",
        )

    def set_clock(self, ahead_s: int) -> None:
        """The wall clock of what is started here from now on; of what runs since an earlier call,
        at once."""
        self._clock = set_clock(self.folder, ahead_s)

    # Commands

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        text: str | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; the caller looks at `returncode`, `stdout` and `stderr`."""
        with subprocess.Popen(
            self._words(command, cwd),
            env=variables({**self._clock, **(env or {})}),
            stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as entry:
            try:
                out, err = entry.communicate(text, timeout=timeout_s)
            except BaseException:
                end(entry)
                raise
        return subprocess.CompletedProcess(command, entry.returncode, out, err)

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Job:
        """Start a command in the background, its output in a file of the host's folder."""
        log = self.folder / f"job-{len(self._jobs)}.log"
        with log.open("wb") as output:
            entry = subprocess.Popen(
                self._words(command, cwd),
                env=variables({**self._clock, **(env or {})}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._jobs.append(Job(entry, log))
        return self._jobs[-1]

    def _words(self, command: Sequence[str], cwd: Path | None) -> list[str]:
        # nsenter goes to the root of the mounts that it enters.
        return [*self.space.inside(), "env", f"--chdir={cwd or Path.cwd()}", *command]

    # Processes, by a word of their environment such as RANK=1: workers of torchrun have sessions of
    # their own

    def find(self, marker: str) -> list[int]:
        return [pid for pid in self.space.pids() if marker in processes.environment(pid)]

    def freeze(self, marker: str) -> list[int]:
        return self._send(marker, signal.SIGSTOP)

    def thaw(self, marker: str) -> list[int]:
        return self._send(marker, signal.SIGCONT)

    def kill(self, marker: str) -> list[int]:
        """Those that are frozen too."""
        return self._send(marker, signal.SIGKILL)

    def _send(self, marker: str, number: signal.Signals) -> list[int]:
        pids: list[int] = []
        # Until there is none that was not hit: one may have forked between the look and the signal.
        while new := [pid for pid in self.find(marker) if pid not in pids]:
            parents = [processes.parent(pid) for pid in new]
            processes.send(new, number)
            if number != signal.SIGSTOP:
                # nsenter stops itself when its child is stopped, and would then not tell us of the
                # child's end.
                entries = (job.entry.pid for job in self._jobs if job.is_running())
                processes.send([pid for pid in entries if pid in parents], signal.SIGCONT)
            pids += new
        # A fault that hits nobody would make a test pass that proves nothing.
        assert pids, f"no process on {self.name} has {marker} in its environment"
        return pids

    # The link

    def cut(self) -> None:
        """Pull the plug at the far end: the host keeps its carrier and gets no error, only
        silence."""
        self._switch.configure(["ip", "link", "set", self._port, "nomaster"])

    def restore(self) -> None:
        self._switch.configure(["ip", "link", "set", self._port, "master", "bridge"])

    def set_mtu(self, num_bytes: int) -> None:
        """At both ends of the link; for an MTU that the host does not know see
        `firewall.drop_larger`."""
        self.space.configure(["ip", "link", "set", "eth0", "mtu", str(num_bytes)])
        self._switch.configure(["ip", "link", "set", self._port, "mtu", str(num_bytes)])

    def set_bandwidth(self, mbit: float | None) -> None:
        """Of the link, in each direction; None lifts the limit."""
        for space, device in ((self.space, "eth0"), (self._switch, self._port)):
            limit = ["tbf", "rate", f"{mbit or 0:g}mbit", "burst", "32kb", "latency", "400ms"]
            space.configure(
                ["tc", "qdisc", "replace", "dev", device, "root", *(limit if mbit else ["noqueue"])]
            )

    def power_off(self) -> None:
        """No farewell: all processes end at once, the link goes. May be called twice."""
        if not self.space.is_open():
            return
        self.space.kill()
        # A frozen nsenter would not bury its child, and the host would wait for that.
        for job in self._jobs:
            end(job.entry)
        self.space.close()
        if self._server:
            self._server.close()
        # The kernel takes it away with the host, but not at once, and `power_on` needs the name.
        with contextlib.suppress(RuntimeError):
            self._switch.configure(["ip", "link", "delete", self._port])


class Testbed:
    """Hosts that know each other by name, on one bridge. What dead processes left is removed
    first."""

    __test__ = False

    def __init__(
        self, folder: Path, names: Sequence[str], *, shm: str = "64m", warm: bool = False
    ) -> None:
        processes.remove_orphans()
        self.folder = folder
        self.hosts: list[Host] = []
        self._switch = Space("switch")
        _open_testbeds.add(self)
        try:
            self._switch.configure(["ip", "link", "add", "bridge", "type", "bridge"])
            self._switch.configure(["ip", "link", "set", "bridge", "addrgenmode", "none", "up"])
            for number, name in enumerate(names, start=1):
                address = f"{FIRST_ADDRESS}{number}"
                self.hosts.append(
                    Host(name, address, folder / name, self._switch, shm=shm, warm=warm)
                )
            for host in self.hosts:
                host.set_names({host.name: host.address for host in self.hosts})
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        for host in self.hosts:
            host.power_off()
        self._switch.close()
        _open_testbeds.discard(self)


_open_testbeds: weakref.WeakSet[Testbed] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for bed in list(_open_testbeds):
        bed.close()
