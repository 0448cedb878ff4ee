"""Hosts for detached jobs: each has a state folder and a systemd user manager of its own, which
lingers, as on a server. The first is the laptop, which only ssh leaves.

    cluster = Cluster(make_testbed("laptop", "a", "b", warm=True), tmp_path)
    name = cluster.launch("--procs", "1", "digits")
    cluster.command("jobs", "--hosts", "a,b")
    cluster.reboot(cluster.bed["b"])           # everything on it ends at once; then its units start
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.multinode import processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.sshd import SshDaemons

ROOT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")
SYSTEMD = "/lib/systemd/systemd"
# A control group for each hierarchy that systemd uses: below it is what the host's units run.
BOOT = """
set -e
for root in {roots}; do
    mkdir -p $root/{group}
    echo $$ > $root/{group}/cgroup.procs
done
mkdir -p /run/user/0 /run/systemd/system
mount -t tmpfs tmpfs /var/lib/systemd
mkdir /var/lib/systemd/linger
touch /var/lib/systemd/linger/root
export XDG_RUNTIME_DIR=/run/user/0 XDG_CONFIG_HOME={config} XDG_STATE_HOME={state}
exec {systemd} --user --log-target=console
"""


class Cluster:
    """A laptop and its hosts."""

    def __init__(
        self,
        bed: Testbed,
        folder: Path,
        *,
        has_systemd: bool = True,
        sshd_lines: Mapping[str, str] | None = None,
    ) -> None:
        self.bed = bed
        self.laptop = bed.hosts[0]
        self.hosts = bed.hosts[1:]
        self.names = ",".join(host.name for host in self.hosts)
        self.folder = folder / "code"
        self.folder.mkdir()
        self.has_systemd = has_systemd
        places = {
            host.name: f"SetEnv XDG_STATE_HOME={self.state(host)} XDG_CONFIG_HOME={self.config(host)}"
            + (sshd_lines or {}).get(host.name, "")
            for host in bed
        }
        self.ssh = SshDaemons(bed, lines=places)
        for host in self.hosts:
            self.boot(host)

    def state(self, host: Host) -> Path:
        return host.folder / "state"

    def config(self, host: Host) -> Path:
        return host.folder / "config"

    def boot(self, host: Host) -> None:
        """What starts by itself when the host does."""
        if not self.has_systemd:
            return
        roots = [CGROUPS / name for name in ("systemd", "unified") if (CGROUPS / name).is_dir()]
        text = BOOT.format(
            roots=" ".join(map(str, roots or [CGROUPS])),
            group=self.group(host),
            config=self.config(host),
            state=self.state(host),
            systemd=SYSTEMD,
        )
        manager = host.start("sh", "-c", text, env={"PYTHONPATH": str(ROOT)})
        private = Path("run/user/0/systemd/private")
        processes.wait_until(
            lambda: (
                Path(f"/proc/{host.space.pid}/root", private).exists() or not manager.is_running()
            ),
            "the user manager",
        )
        assert manager.is_running(), manager.text()

    def group(self, host: Host) -> str:
        return (
            f"drumline-testbed-{processes.stat_fields(self.bed.hosts[0].space.pid)[19]}-{host.name}"
        )

    def reboot(self, *hosts: Host) -> None:
        for host in hosts:
            host.power_off()
        for host in hosts:
            host.power_on()
            self.ssh.serve(host)
            self.boot(host)

    def start(self, *words: str, on: Host | None = None) -> Job:
        """`drumline ...` on the laptop, in the background."""
        host = on or self.laptop
        return host.start(
            *(host.python, "-m", "drumline", *words),
            env={
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "eth0",
                "DRUMLINE_SSH": f"ssh -F {self.ssh.config}",
                "XDG_STATE_HOME": str(self.state(host)),
                "XDG_CONFIG_HOME": str(self.config(host)),
                "PYTHONUNBUFFERED": "1",
            },
            cwd=self.folder,
        )

    def command(
        self, *words: str, code: int = 0, on: Host | None = None, timeout_s: float = 60.0
    ) -> str:
        """The same to its end; what it prints."""
        job = self.start(*words, on=on)
        assert job.wait(timeout_s) == code, job.text()
        return job.text()

    def launch(self, *words: str, hosts: str = "") -> str:
        """The name of the job."""
        text = self.command("launch", "--detach", "--hosts", hosts or self.names, *words)
        match = re.search(r"attach: drumline attach (\S+) --hosts", text)
        assert match, text
        return match[1]

    def jobs(self) -> list[dict[str, dict[str, object]]]:
        text = self.command("jobs", "--hosts", self.names, "--json")
        return list(json.loads(text))

    def state_of(self, host: Host, name: str) -> dict[str, object]:
        (path,) = self.state(host).glob(f"drumline/jobs/{name}/node-*/state.json")
        return dict(json.loads(path.read_text()))

    def wait_for_state(self, name: str, state: str, **fields: object) -> None:
        def has_state(host: Host) -> bool:
            found = self.state_of(host, name)
            return found["state"] == state and fields.items() <= found.items()

        for host in self.hosts:
            processes.wait_until(
                lambda host=host: has_state(host), f"{name} {state} on {host}", timeout_s=90
            )

    def left_on(self, host: Host) -> list[str]:
        """What a job left behind: processes, units, folders in /dev/shm."""
        pids = [pid for pid in host.space.pids() if "drumline" in processes.command(pid)]
        left = [processes.command(pid) for pid in pids]
        left += map(str, (self.config(host) / "systemd").rglob("drumline-*"))
        shared = Path(f"/proc/{host.space.pid}/root/dev/shm")
        return left + [path.name for path in shared.iterdir() if "drumline" in path.name]

    def wait_for_nothing_left(self) -> None:
        for host in self.hosts:
            try:
                processes.wait_until(lambda host=host: not self.left_on(host), "nothing left")
            except AssertionError:
                raise AssertionError(f"left on {host}: {self.left_on(host)}") from None

    def close(self) -> None:
        """The control groups of the hosts, when these are off."""
        groups = [group for host in self.hosts for group in CGROUPS.glob(f"*/{self.group(host)}")]
        self.bed.close()
        for group in groups:
            subprocess.run(["find", str(group), "-depth", "-type", "d", "-delete"], check=False)
