"""`drumline launch --detach` where logind ends all processes of a login with it: a real systemd,
logind and sshd, on a host of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import processes
from tests.multinode.detached import CGROUPS, ROOT
from tests.multinode.hosts import Host, Testbed
from tests.multinode.needs import tool
from tests.multinode.sshd import CLIENT, make_key

NEEDED = (
    "/lib/systemd/systemd-logind",
    "/usr/bin/dbus-daemon",
    "/lib/x86_64-linux-gnu/security/pam_systemd.so",
)
# Another user may not run the Python of a home folder.
PYTHON = "/usr/bin/python3"
SYSTEMD = "/lib/systemd/systemd --system"
UNITS = Path("/lib/systemd/system")
COPIED = (
    *("dbus.service", "dbus.socket", "systemd-logind.service", "user.slice", "slices.target"),
    *("user@.service", "user-runtime-dir@.service", "sockets.target", "shutdown.target"),
    *("basic.target", "paths.target", "timers.target"),
)
# What a service may not do inside of a container.
CONFINED = (
    *("Capability", "Protect", "Private", "Restrict", "SystemCall", "MemoryDeny", "Lock", "Device"),
    *("NoNewPriv", "ReadWrite", "Runtime", "State", "IPAddress", "FileDescriptor", "Watchdog"),
    *("Wants=", "Requires=", "After=modprobe", "ExecStartPre"),
)
PAM = (
    "account required pam_permit.so\nauth required pam_permit.so\nsession required pam_systemd.so\n"
)
SERVER = """
ListenAddress {address}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/user-key.pub
StrictModes no
UsePAM yes
PidFile none
"""
MACHINE = """
[Unit]
Requires=dbus.socket dbus.service systemd-logind.service sshd.service
"""
SSHD = """
[Unit]
After=systemd-logind.service dbus.service
[Service]
ExecStart={sshd} -D -e -f {folder}/sshd_config
KillMode=process
"""
BOOT = """
set -e
for root in {roots}; do
    mkdir -p $root/{group}
    echo $$ > $root/{group}/cgroup.procs
done
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/dbus /run/systemd/system
mount -t tmpfs tmpfs /var/lib/systemd
mkdir /var/lib/systemd/linger
for name in passwd group shadow pam.d systemd; do mount --bind {folder}/$name /etc/$name; done
exec env -i container=docker PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH={folder}/units \
    {systemd} --unit=machine.target --log-target=console --show-status=false
"""


def prepare(host: Host) -> Path:
    """The files of a machine with one more user; how ssh reaches it."""
    folder = host.folder / "machine"
    home = folder / "home"
    for name in ("units", "pam.d", "systemd", "home"):
        (folder / name).mkdir(parents=True)
    home.chmod(0o777)
    users = {
        "passwd": f"tester:x:1234:1234::{home}:/bin/bash\n",
        "group": "tester:x:1234:\n",
        "shadow": "tester:*:19000:0:99999:7:::\n",
    }
    for name, line in users.items():
        (folder / name).write_text(Path("/etc", name).read_text() + line)
    for name in ("sshd", "systemd-user", "other"):
        (folder / "pam.d" / name).write_text(PAM)
    (folder / "systemd/logind.conf").write_text("[Login]\nKillUserProcesses=yes\n")

    units = folder / "units"
    for name in COPIED:
        (units / name).write_text((UNITS / name).read_text())
    logind = units / "systemd-logind.service"
    lines = logind.read_text().splitlines(keepends=True)
    logind.write_text("".join(line for line in lines if not line.startswith(CONFINED)))
    (units / "sysinit.target").write_text("[Unit]\nDefaultDependencies=no\n")
    (units / "machine.target").write_text(MACHINE)
    (units / "sshd.service").write_text(SSHD.format(sshd=tool("sshd"), folder=folder))
    make_key(folder / "host-key")
    user_key = make_key(folder / "user-key")
    (folder / "sshd_config").write_text(SERVER.format(address=host.address, folder=folder))
    known = folder / "known"
    known.write_text(f"{host.name} {(folder / 'host-key.pub').read_text()}")
    config = folder / "ssh_config"
    config.write_text(CLIENT.format(key=user_key, known=known).replace("User root", "User tester"))
    return config


@pytest.mark.soak
@pytest.mark.skipif(not all(map(Path.exists, map(Path, NEEDED))), reason="needs logind and D-Bus")
def test_a_job_that_would_end_with_the_login_is_refused(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    bed = make_testbed("laptop", "a")
    laptop, host = bed.hosts
    config = prepare(host)
    group = f"drumline-logind-{host.space.pid}"
    roots = [CGROUPS / name for name in ("systemd", "unified") if (CGROUPS / name).is_dir()]
    boot = BOOT.format(
        roots=" ".join(map(str, roots or [CGROUPS])),
        group=group,
        folder=config.parent,
        systemd=SYSTEMD,
    )
    machine = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    host.start(*machine, "sh", "-c", boot)
    ssh = f"ssh -F {config}"
    processes.wait_until(
        lambda: laptop.run(*ssh.split(), "a", "true").returncode == 0, "ssh answers", timeout_s=60
    )
    code = tmp_path / "code"
    code.mkdir(mode=0o777)
    code.chmod(0o777)
    (code / "stay.py").write_text("import time\ntime.sleep(600)\n")
    packages = sysconfig.get_path("purelib")

    def drumline(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "drumline", *words[:1], "--hosts", "a", "--ssh", ssh]
        variables = {"PYTHONPATH": f"{ROOT}:{packages}"}
        return laptop.run(*command, "--python", PYTHON, *words[1:], env=variables, cwd=code)

    done = drumline("launch", "--detach", "--procs", "1", "stay.py")
    assert done.returncode == 3
    assert "a: the job would end with this login: logind.conf has KillUserProcesses=yes there" in (
        done.stderr
    )
    assert (
        "try: run `loginctl enable-linger tester` there, with sudo if it is refused" in done.stderr
    )

    (parent,) = [pid for pid in host.space.pids() if processes.command(pid).startswith("unshare ")]
    (inside,) = processes.children(parent)
    enter = ["nsenter", f"--target={inside}", "--mount", "--pid", "--net"]
    subprocess.run([*enter, "loginctl", "enable-linger", "tester"], check=True)
    done = drumline("launch", "--detach", "--procs", "1", "stay.py")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    name = done.stdout.partition("attach: drumline attach ")[2].split()[0]
    processes.wait_until(
        lambda: f"{name}  running" in drumline("jobs").stdout,
        "it runs without a login",
        timeout_s=120,
    )
    assert "it was stopped" in drumline("stop", name).stdout
    bed.close()
    for root in roots:
        subprocess.run(["find", str(root / group), "-depth", "-type", "d", "-delete"], check=True)
