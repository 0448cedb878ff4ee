"""What runs on a node: the user data, for real, on a file system of its own with stand-ins; and the
idle shutdown."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distributions, version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from drumline.launch.aws import idle_shutdown
from drumline.launch.aws.cluster_creation import TEMPLATE, template_text
from drumline.launch.aws.instance_type import Hardware
from drumline.launch.aws.own_wheels import build_wheel
from tests.aws_node import write_programs
from tests.multinode.needs import missing
from tests.unit.launch.aws.test_template import load

# The node's own disk: tmpfs in a mount namespace, so that nothing of this machine is touched.
DISK = """
set -e
for folder in /mnt /opt /run /var/log /etc/systemd/system; do mount -t tmpfs tmpfs $folder; done
mount --bind {folder}/fstab /etc/fstab
PATH={path} bash {folder}/user-data || echo "exit code $?"
for name in /etc/systemd/system/* /opt/drumline/{prepare,idle_shutdown.py,volume.conf}; do
  [ -e $name ] && cp $name {folder}/result/
done
/opt/drumline/prepare /mnt/code/job && stat -c %u /mnt/code/job /mnt/shared > {folder}/result/owners || true
{more}
"""
# The metadata service, and torch with four GPUs.
METADATA = 'case "$*" in *api/token*) echo token ;; *meta-data/instance-id*) echo i-7 ;; esac'
VALUES = {
    "Volume": "fs-1",
    "Address": "10.0.0.9",
    "Requirements": "drumline[aws]==0.1.0 torch==2.13.0",
    "GpuCount": "4",
    "SignalUrl": "https://signal.example/?Signature=x&y=z",
    "IdleMinutes": "60",
    "AWS::Region": "us-east-1",
    "AWS::URLSuffix": "amazonaws.com",
    "CopiesDrumline": "false",
    "Made": "rtbassoc-1 - rtb-1|0.0.0.0/0 - -",
}


HARDWARE = Hardware(arch="x86_64", num_vcpus=48, num_gpus=4, gpu="L4", num_efas=1, num_cards=1)


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        for name in ("result", "shared"):
            (folder / name).mkdir()
        for name in ("fstab", "log"):
            (folder / name).touch()
        self._path = write_programs(
            folder, shared=folder / "shared", metadata=METADATA, python="echo 4"
        )

    def boot(self, *commands: str, **changes: str) -> dict[str, Any]:
        """Run the user data, and then more commands; what it reported to the stack. Empty: nothing."""
        data = load(template_text(HARDWARE, {}))["Resources"]["LaunchTemplate"]["Properties"][
            "LaunchTemplateData"
        ]
        text, _ = data["UserData"]["Fn::Base64"]["Fn::Sub"]
        for name, value in {**VALUES, **changes}.items():
            assert f"${{{name}}}" in text, "without it the nodes do not wait for what it names"
            text = text.replace(f"${{{name}}}", value)
        assert "${" not in text, "CloudFormation would look for a parameter"
        (self.folder / "user-data").write_text(text)
        assert len(text) < 16_384, "AWS takes no longer user data"
        script = DISK.replace("{more}", "\n".join(commands)).replace("{folder}", str(self.folder))
        script = script.replace("{path}", self._path)
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.console = done.stdout
        report = self.folder / "report"
        answer: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
        return answer


@pytest.fixture(name="node")
def make_node(tmp_path: Path) -> Node:
    if why := missing():
        pytest.skip(why)
    return Node(tmp_path)


def test_user_data_prepares_a_node(node: Node) -> None:
    assert node.boot() == {
        "Status": "SUCCESS",
        "UniqueId": "i-7",
        "Reason": "ready",
        "Data": "ready",
    }
    place, point, kind, options, *_ = (node.folder / "fstab").read_text().split()
    assert (place, point, kind) == ("127.0.0.1:/", "/mnt/shared", "nfs4")
    tunnel = {"_netdev", "x-systemd.requires=drumline-volume.service", "port=20490"}
    assert tunnel <= set(options.split(","))
    assert node.log.read_text().splitlines() == [
        "systemctl disable --now apt-daily.timer apt-daily-upgrade.timer unattended-upgrades.service",
        "apt-get -q -o DPkg::Lock::Timeout=600 update",
        "apt-get -q -o DPkg::Lock::Timeout=600 install --yes git nfs-common python3-venv rsync stunnel4",
        "systemctl enable --now drumline-volume.service",
        "pip -q install --retries 10 drumline[aws]==0.1.0 torch==2.13.0",
        "systemctl enable --now drumline-idle.timer",
        "curl -sS --retry 10 -T /run/drumline-report https://signal.example/?Signature=x&y=z",
    ]
    service = (node.folder / "result/drumline-idle.service").read_text()
    command = " ".join(service.split("ExecStart=")[1].split())
    assert command == ("/opt/drumline/bin/python /opt/drumline/idle_shutdown.py i-7 us-east-1 60")
    assert (node.folder / "result/idle_shutdown.py").read_text() == Path(
        idle_shutdown.__file__
    ).read_text()
    assert (
        "OnUnitActiveSec=60"
        in (node.folder / "result/drumline-idle.timer").read_text().splitlines()
    )
    assert (node.folder / "result/owners").read_text().split() == ["1000", "1000"]


def test_an_image_with_the_mount_helper_uses_it(node: Node) -> None:
    helper = node.folder / "bin/mount.efs"
    helper.touch(mode=0o755)
    assert node.boot()["Status"] == "SUCCESS"
    options = "_netdev,tls,noresvport,mounttargetip=10.0.0.9"
    assert (node.folder / "fstab").read_text() == f"fs-1:/ /mnt/shared efs {options} 0 0\n"
    assert not (node.folder / "result/volume.conf").exists()


@pytest.mark.skipif(shutil.which("stunnel4") is None, reason="`make tools` installs stunnel4")
@pytest.mark.parametrize("name", ["fs-1.efs.us-east-1.amazonaws.com", "fs-2.example.org"])
def test_the_tunnel_reaches_the_volume_alone(node: Node, tmp_path: Path, name: str) -> None:
    """A real stunnel, and a server whose certificate has this name."""
    assert node.boot()["Status"] == "SUCCESS"
    settings = (node.folder / "result/volume.conf").read_text()
    certificate = make_certificate(tmp_path, name)
    with serve_echo(certificate) as address, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        for before, after in (
            ("10.0.0.9:2049", address),
            ("127.0.0.1:20490", f"127.0.0.1:{port}"),
            ("/etc/ssl/certs/ca-certificates.crt", str(certificate)),
        ):
            assert before in settings
            settings = settings.replace(before, after)
        (tmp_path / "here.conf").write_text(settings)
        command = ["stunnel4", str(tmp_path / "here.conf")]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as tunnel:
            assert answer_through(port) == (b"hello" if name.startswith("fs-1.") else b"")
            tunnel.terminate()


def make_certificate(folder: Path, name: str) -> Path:
    """With its key, in one file."""
    path = folder / "certificate.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=volume -addext subjectAltName=DNS:{name}"
    command = ["openssl", *words.split(), "-keyout", str(path), "-out", str(folder / "public.pem")]
    subprocess.run(command, check=True, capture_output=True)
    with path.open("a") as file:
        file.write((folder / "public.pem").read_text())
    return path


@contextmanager
def serve_echo(certificate: Path) -> Iterator[str]:
    """Answers one connection; its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def answer() -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            with connection, context.wrap_socket(connection, server_side=True) as secured:
                secured.sendall(secured.recv(5))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=answer)
        thread.start()
        yield "{}:{}".format(*server.getsockname())
        thread.join()


def answer_through(port: int) -> bytes:
    """To `hello`; empty: the connection was closed."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as end:
            end.sendall(b"hello")
            with suppress(ConnectionResetError):
                return end.recv(5)
            return b""
        time.sleep(0.05)
    raise AssertionError("the tunnel does not listen")


def test_the_lock_of_the_package_lists_is_waited_for(node: Node) -> None:
    """Ubuntu's own update holds it on first boot."""
    (node.folder / "locked").touch()
    assert node.boot()["Status"] == "SUCCESS"
    assert node.log.read_text().count("Timeout=600 update\n") == 2


@pytest.mark.parametrize(
    ("obstacle", "changes", "reason"),
    [
        ("no-volume", {}, "the volume fs-1 at 10.0.0.9 cannot be mounted"),
        ("no-index", {}, "pip cannot install drumline[aws]==0.1.0 torch==2.13.0"),
        ("no-boto3", {}, "drumline[aws]==0.1.0 torch==2.13.0 do not bring boto3, torch, drumline"),
        ("", {"GpuCount": "8"}, "torch finds '4' GPUs of 8"),
    ],
)
def test_a_node_that_cannot_be_prepared_says_why_on_its_console_and_ends_itself(
    node: Node, obstacle: str, changes: dict[str, str], reason: str
) -> None:
    if obstacle:
        (node.folder / obstacle).touch()
    assert node.boot(**changes) == {}, "a failure would end the stack"
    assert f"drumline: i-7: {reason}" in node.console.splitlines()
    assert node.log.read_text().splitlines()[-1] == "systemctl poweroff"
    assert not (node.folder / "result/prepare").exists(), "launch would take the node for ready"


def test_a_launch_of_another_version_is_told_so(node: Node) -> None:
    old_words = f"set +e; /opt/drumline/prepare /mnt/code/job abc 2> {node.folder}/errors; "
    node.boot(f"{old_words} echo $? > {node.folder}/code; true")
    assert (node.folder / "code").read_text() == "65\n"
    assert (node.folder / "errors").read_text().splitlines()[-1] == (
        "this launch is of another version of drumline than the cluster; drumline aws down, then up"
    )


PREPARE = """
set +e
prepare() {{ /opt/drumline/prepare /mnt/code/job {hash} {name} < $1 2>> {folder}/errors; echo $? >> {folder}/codes; }}
prepare {folder}/changed
ls /opt/drumline/site >> {folder}/codes 2> /dev/null
prepare {folder}/wheel & prepare {folder}/wheel & wait
prepare /dev/null
cp -r /opt/drumline/site {folder}/result/site
"""


@pytest.mark.soak
def test_a_node_installs_the_wheel_of_launch_and_nothing_else(node: Node) -> None:
    """A real wheel, a real pip: no index is asked, another hash is refused, the same wheel is not
    installed twice, not by two launches at once either."""
    wheel = build_wheel()
    content = wheel.content
    (node.folder / "wheel").write_bytes(content)
    (node.folder / "changed").write_bytes(content[:5000] + b"x" + content[5001:])
    digest = hashlib.sha256(content).hexdigest()
    boot = {"CopiesDrumline": "true", "Requirements": "torch==2.13.0", "IdleMinutes": "0"}
    report = node.boot(PREPARE.format(folder=node.folder, hash=digest, name=wheel.name), **boot)
    assert report["Status"] == "SUCCESS"
    assert (node.folder / "codes").read_text().split() == ["65", "0", "0", "0"]
    error = f"the wheel that arrived does not have the SHA-256 {digest}\n"
    assert (node.folder / "errors").read_text().count(error) == 1
    installs = [line for line in node.log.read_text().splitlines() if line.startswith("pip ")]
    assert installs[0] == "pip -q install --retries 10 torch==2.13.0", (
        "drumline was asked from an index"
    )
    assert [line.split(" /")[0] for line in installs[1:]] == [
        "pip -q install --no-index --no-deps --force-reinstall"
    ]
    site = node.folder / "result/site"
    assert (site / "drumline/launch/aws/cluster.yaml").read_bytes() == TEMPLATE.read_bytes()
    versions = {installed.name: installed.version for installed in distributions(path=[str(site)])}
    assert versions == {"drumline": version("drumline")}


def test_no_timer_without_a_limit(node: Node) -> None:
    assert node.boot(IdleMinutes="0")["Status"] == "SUCCESS"
    assert "drumline-idle.timer" not in node.log.read_text()


# The idle shutdown

NODE = ("i-7", "us-east-1", "10")


@pytest.fixture(name="ended")
def make_idle_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A node without load; what was ended."""
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr("os.getloadavg", lambda: (0.03, 0.4, 9.0))
    monkeypatch.setattr(idle_shutdown, "LAST_BUSY", tmp_path / "busy")
    monkeypatch.setattr(idle_shutdown, "end_instance", lambda *which: ended.append(which))
    monkeypatch.setenv("PATH", str(tmp_path))
    return ended


def age(path: Path, minutes: float) -> None:
    then = time.time() - minutes * 60
    os.utime(path, (then, then))


def test_a_node_ends_itself_after_the_idle_minutes(
    ended: list[tuple[str, str]], tmp_path: Path
) -> None:
    idle_shutdown.main(*NODE)
    assert ended == [], "the first minute counts as busy: the node has just started"
    age(tmp_path / "busy", 9)
    idle_shutdown.main(*NODE)
    assert ended == []
    age(tmp_path / "busy", 11)
    idle_shutdown.main(*NODE)
    assert ended == [("i-7", "us-east-1")]


def test_load_on_the_cpu_or_a_gpu_keeps_it(
    ended: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy").touch()
    monkeypatch.setattr("os.getloadavg", lambda: (0.61, 0.4, 0.1))
    age(tmp_path / "busy", 99)
    idle_shutdown.main(*NODE)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 0\necho 37\n")
    smi.chmod(0o755)
    age(tmp_path / "busy", 99)
    idle_shutdown.main(*NODE)
    assert ended == []
    smi.write_text("#!/bin/sh\necho 0\necho '[N/A]'\n")
    age(tmp_path / "busy", 99)
    idle_shutdown.main(*NODE)
    assert len(ended) == 1


def test_ending_shrinks_the_group(account: Any, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = {
        "ActivityId": "1",
        "AutoScalingGroupName": "g",
        "Cause": "c",
        "StartTime": 0,
        "StatusCode": "InProgress",
    }
    stub(
        "autoscaling",
        "terminate_instance_in_auto_scaling_group",
        {"Activity": activity},
        InstanceId="i-7",
        ShouldDecrementDesiredCapacity=True,
    )
    monkeypatch.setattr("boto3.client", lambda service, region_name: account.client(service))
    idle_shutdown.end_instance("i-7", "us-east-1")
