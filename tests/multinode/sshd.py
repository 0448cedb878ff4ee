"""One ssh server per host, with keys made for this testbed alone; the user's own keys and config
are not touched."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.needs import tool

SERVER = """
ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {authorized}
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
"""
CLIENT = """
Host *
    User root
    IdentityFile {key}
    IdentitiesOnly yes
    BatchMode yes
    StrictHostKeyChecking yes
    UserKnownHostsFile {known}
    GlobalKnownHostsFile none
    ConnectTimeout 5
    LogLevel ERROR
"""


class SshDaemons:
    """Running servers on all hosts of a testbed; they end with their hosts. `config` is for `ssh
    -F`."""

    def __init__(self, bed: Testbed, lines: Mapping[str, str] | None = None) -> None:
        """`lines`: for the configuration of a host's server, by its name."""
        self.lines = lines or {}
        self.folder = bed.folder / "ssh"
        self.folder.mkdir()
        self.config = self.folder / "config"
        self.known_hosts = self.folder / "known_hosts"
        user_key = make_key(self.folder / "user")
        self.config.write_text(
            CLIENT.format(key=_quoted(user_key), known=_quoted(self.known_hosts))
        )
        with self.known_hosts.open("w") as known:
            for host in bed:
                public = _public(make_key(self.folder / host.name))
                known.write(f"{host.name},{host.address} {public}\n")
        self.jobs = {host.name: self.serve(host) for host in bed}

    def serve(self, host: Host) -> Job:
        """Also for a host that was off and is on again."""
        config = host.folder / "sshd_config"
        key = _quoted(self.folder / host.name)
        authorized = _quoted(self.folder / "user.pub")
        text = SERVER.format(address=host.address, key=key, authorized=authorized)
        config.write_text(f"{text}{self.lines.get(host.name, '')}\n")
        # A root account that is locked (`!`) may not log in even with a key; on these hosts it has
        # no password.
        shadow = host.folder / "shadow"
        shadow.write_text("root:*:19000:0:99999:7:::\n")
        assert host.run("mount", "--bind", str(shadow), "/etc/shadow").returncode == 0
        job = host.start(tool("sshd"), "-D", "-e", "-f", str(config))
        job.wait_for("Server listening", timeout_s=20)
        return job

    def command(self, host: str, *words: str) -> list[str]:
        """To be run on one host: a command on another. As ever with ssh, the words go through a
        shell there."""
        return [tool("ssh"), "-F", str(self.config), host, *words]


def make_key(path: Path) -> Path:
    words = [tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return path


def _public(key: Path) -> str:
    return key.with_suffix(".pub").read_text().strip()


def _quoted(path: Path) -> str:
    return f'"{path}"'
