"""`drumline aws launch` with real ssh: hosts of a testbed are the instances that a moto server
started.

moto gives instances the addresses of their subnet in order, so the hosts have them too. Each host
boots with the user data that AWS has for it; tests/aws_node.py stands in for apt, pip, systemd and
the NFS mount, and the metadata service is a server at its real address. On them `ubuntu` is another
name of root, because the files of the test belong to root. What moto lacks (prices, quotas, wait
conditions): tests/unit/launch/aws/conftest.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.cli.aws_command import NOTICE
from drumline.report.verify.run_check import verify_run
from tests.aws_node import write_programs
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.needs import tool
from tests.multinode.processes import wait_until
from tests.multinode.sshd import SERVER, make_key

pytest.importorskip("moto", reason="pip install 'drumline[dev]' brings it")
ROOT = Path(__file__).parents[2]
ACCOUNT = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:5000",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
}
# Runs where the user sits: a moto server, with a cluster. Replaces the node that a file names, as
# AWS does: one that is taken back at once, another when it was reported.
AWS = """
import base64, json, sys, time
from pathlib import Path
from moto.server import ThreadedMotoServer
from drumline.launch.aws import cluster_creation, cluster_plan, prices
from drumline.launch.aws.account import connect
from drumline.launch.aws.cluster_creation import bring_up
from drumline.launch.aws.stack import nodes_of
from drumline.launch.aws.cluster_settings import ClusterSettings
ThreadedMotoServer("127.0.0.1", 5000, verbose=False).start()
account, template, lost = connect("us-east-1", None), Path(sys.argv[1]), Path(sys.argv[2])
is_spot = sys.argv[3] == "spot"
ec2 = lambda operation, **given: account.call("ec2", operation, **given)

def show():
    print("nodes", json.dumps([[node.id, node.address] for node in nodes_of(account, "t")]), flush=True)

vpc = ec2("create_vpc", CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
place = {"CidrBlock": "10.77.0.0/24", "AvailabilityZone": "us-east-1a"}
subnet = ec2("create_subnet", VpcId=vpc, **place)["Subnet"]["SubnetId"]
image = ec2("register_image", Name="image", Architecture="x86_64", RootDeviceName="/dev/sda1")["ImageId"]
ec2("create_key_pair", KeyName="laptop")
text = cluster_creation.TEMPLATE.read_text().replace("RetainExceptOnCreate", "Retain")
cluster_creation.TEMPLATE = template
template.write_text(text.replace("!GetAtt MountTarget.IpAddress", "!Ref MountTarget"))
prices.listed_price = lambda *_, **__: 1.0
prices.spot_prices = lambda *_: {"us-east-1a": 0.5}
cluster_plan.check_quota = lambda *_: "not asked"
cluster_plan.check_way_out = lambda *_, **__: None  # its subnet is a bridge
named = {"name": "t", "type": "c5.large", "ami": image, "key": "laptop", "subnet": subnet, "spot": is_spot}
named["ssh_from"] = "10.77.0.0/16"
settings = ClusterSettings(region="us-east-1", **named)
bring_up(account, cluster_plan.make_plan(account, settings), lambda text: None)
made = ec2("describe_launch_templates")["LaunchTemplates"][0]["LaunchTemplateId"]
data = ec2("describe_launch_template_versions", LaunchTemplateId=made)["LaunchTemplateVersions"][0]
template.with_name("user-data").write_bytes(base64.b64decode(data["LaunchTemplateData"]["UserData"]))
show()
while not lost.exists():
    time.sleep(0.2)
ids = [lost.read_text()]
is_reported = is_spot
while not is_reported:  # launch prints the line that the test waits for before it calls AWS
    time.sleep(0.2)
    (found,) = account.call("autoscaling", "describe_auto_scaling_instances", InstanceIds=ids)["AutoScalingInstances"]
    is_reported = found["HealthStatus"] == "Unhealthy"
ec2("terminate_instances", InstanceIds=ids)
show()
time.sleep(1000)
"""
# A node before it boots: disks of its own, and `ubuntu`.
DISKS = """
set -e
for folder in /opt /mnt /var/log; do mount -t tmpfs tmpfs $folder; done
for name in passwd shadow fstab; do mount --bind {folder}/$name /etc/$name; done
"""
# The metadata service of a node, as AWS documents it: nothing without a token, and no notice until
# there is one.
METADATA = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
instance, notice = sys.argv[1], Path(sys.argv[2])

class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self):
        lifetime = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", 0))
        is_right = self.path == "/latest/api/token" and 1 <= lifetime <= 21600
        self.answer(*((200, "a-token") if is_right else (400, "Bad Request")))

    def do_GET(self):
        there = {"instance-id": instance, **({"spot/instance-action": notice.read_text()} if notice.exists() else {})}
        if self.headers.get("X-aws-ec2-metadata-token") != "a-token":
            return self.answer(401, "Unauthorized")
        text = there.get(self.path.removeprefix("/latest/meta-data/"))
        self.answer(*((404, "Not Found") if text is None else (200, text)))

    def answer(self, code, text):
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

server = ThreadingHTTPServer(("169.254.169.254", 80), Metadata)
print("listening", flush=True)
server.serve_forever()
"""
# Slow until it is told otherwise, so that a node can be lost in the middle.
TASK = """
import time
from pathlib import Path
from tests.jobs import Classify, Loss

class Slow(Classify):
    def loss(self, model, batch) -> Loss:
        if not Path("hurry").exists():
            time.sleep(0.3)
        return super().loss(model, batch)
"""


# AWS keeps the first addresses of a subnet for itself, and one is that of the volume.
HOSTS = ("desk", "router", "resolver", "volume", "node-5", "node-6", "node-7")


class Cloud:
    """The account on the desk, and the hosts that its instances are."""

    def __init__(self, bed: Testbed, folder: Path, market: str = "on-demand") -> None:
        self.bed = bed
        self.folder = folder
        self.desk = bed["desk"]
        self.job_folder = folder / "job"
        for name in ("home/.ssh", "shared", "job"):
            (folder / name).mkdir(parents=True)
        (self.job_folder / "slow.py").write_text(TASK)
        self.key = make_key(folder / "laptop")
        (folder / "home/.ssh/config").write_text(
            f"UserKnownHostsFile {folder}/known_hosts\nIdentitiesOnly yes\n"
        )
        # ssh takes ~ from here, not from HOME.
        (folder / "passwd").write_text(f"root:x:0:0::{folder}/home:/bin/bash\n")
        assert (
            self.desk.run("mount", "--bind", str(folder / "passwd"), "/etc/passwd").returncode == 0
        )
        words = (str(folder / "cluster.yaml"), str(folder / "lost"), market)
        self._account = self.desk.start(sys.executable, "-c", AWS, *words, env=ACCOUNT)

    def nodes(self, times: int) -> list[list[str]]:
        """Their ids and addresses, once the account has shown them so often."""
        wait_until(
            lambda: self._account.text().count("nodes [") == times, "the nodes", timeout_s=100
        )
        return list(json.loads(self._account.text().splitlines()[-1].removeprefix("nodes ")))

    def replace(self, instance: str) -> list[list[str]]:
        """What AWS does with an instance that is unhealthy or taken back, and moto does not. Then
        its nodes."""
        (self.folder / "id").write_text(instance)
        (self.folder / "id").rename(self.folder / "lost")
        return self.nodes(2)

    def boot(self, instance: str, address: str) -> Host:
        host = next(host for host in self.bed if host.address == address)
        python = f'exec {host.python} "$@"'
        metadata = f'exec {tool("curl")} "$@"'
        path = write_programs(
            host.folder, shared=self.folder / "shared", metadata=metadata, python=python
        )
        (host.folder / "passwd").write_text(
            Path("/etc/passwd").read_text() + "ubuntu:x:0:0::/:/bin/bash\n"
        )
        (host.folder / "shadow").write_text("ubuntu:*:19000:0:99999:7:::\n")
        (host.folder / "fstab").touch()
        assert host.run("bash", "-c", DISKS.format(folder=host.folder)).returncode == 0
        host.space.configure(["ip", "address", "add", "169.254.169.254/32", "dev", "lo"])
        words = (instance, str(host.folder / "notice"))
        host.start(sys.executable, "-c", METADATA, *words).wait_for("listening")
        done = host.run(
            "bash", str(self.folder / "user-data"), env={"PATH": path, "PYTHONPATH": str(ROOT)}
        )
        assert json.loads((host.folder / "report").read_text())["Status"] == "SUCCESS", (
            done.stdout + done.stderr
        )
        key = make_key(host.folder / "host_key")
        public = self.key.with_suffix(".pub")
        server = SERVER.format(address=host.address, key=key, authorized=public)
        (host.folder / "sshd_config").write_text(f"{server}SetEnv PATH={path}\n")
        host.start(tool("sshd"), "-D", "-e", "-f", str(host.folder / "sshd_config")).wait_for(
            "Server listening"
        )
        return host

    def launch(self, *arguments: str) -> Job:
        return self.desk.start(
            *(
                self.desk.python,
                "-m",
                "drumline",
                "aws",
                "launch",
                "--name",
                "t",
                "--region",
                "us-east-1",
            ),
            *(
                "--identity",
                str(self.key),
                "--no-sync",
                "--attach",
                "--procs",
                "1",
                "--max-restarts",
                "0",
                *arguments,
            ),
            *("--train.batch_size", "8", "--dist.device", "cpu", "--log.display", "plain"),
            env={**ACCOUNT, "GLOO_SOCKET_IFNAME": "eth0"},
            cwd=self.job_folder,
        )


def checkpoints(cloud: Cloud) -> list[int]:
    folders = (cloud.folder / "shared/runs/Slow/checkpoints").glob("step-*")
    return sorted(
        int(number[1]) for path in folders if (number := re.fullmatch(r"step-(\d+)", path.name))
    )


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_lost_node_is_replaced_and_the_run_resumes(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    cloud = Cloud(make_testbed(*HOSTS, warm=True), tmp_path / "cloud")
    (first, first_address), (lost, lost_address) = cloud.nodes(1)
    stays = cloud.boot(first, first_address)
    leaves = cloud.boot(lost, lost_address)
    job = cloud.launch(
        "--lost-after", "5", "slow.py:Slow", "--train.steps", "40", "--checkpoint.every_steps", "4"
    )
    wait_until(
        lambda: len(checkpoints(cloud)) > 0 or not job.is_running(), "a checkpoint", timeout_s=120
    )
    assert job.is_running(), job.text()
    leaves.power_off()
    job.wait_for(
        f"{lost_address} ({lost}) does not answer: asking AWS to replace it", timeout_s=120
    )
    (kept, _), (new, new_address) = cloud.replace(lost)
    assert kept == first, "the others stay"
    cloud.boot(new, new_address)
    (cloud.job_folder / "hurry").touch()
    code = job.wait(timeout_s=150)
    text = job.text()
    assert code == 0, text[-3000:]
    assert (
        f"AWS took back {lost_address}; waiting for its replacement, then the run resumes" in text
    )
    assert checkpoints(cloud)[-1] == 40
    assert "2 links, 2 fine" in text, "doctor did not check the pairs"
    resumed = re.search(
        rf"\[{stays.address} 0\] .* resumed at step (\d+) from /mnt/shared/runs/Slow/", text
    )
    assert resumed is not None, "rank 0 is not on the node that stayed, or started over"
    assert 0 < int(resumed[1]) < 40


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_a_spot_notice_saves_and_the_run_resumes_on_the_replacement(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    """The only checkpoint before the end is that of the notice, and without it the steps take two
    minutes."""
    cloud = Cloud(make_testbed(*HOSTS, warm=True), tmp_path / "cloud", "spot")
    (first, first_address), (taken, taken_address) = cloud.nodes(1)
    stays = cloud.boot(first, first_address)
    leaves = cloud.boot(taken, taken_address)
    job = cloud.launch(
        "--no-doctor", "slow.py:Slow", "--train.steps", "400", "--checkpoint.every_steps", "1000"
    )
    job.wait_for("first step ", timeout_s=120)
    notice = '{"action": "terminate", "time": "2026-11-18T08:22:00Z"}'
    (leaves.folder / "text").write_text(notice)
    (leaves.folder / "text").rename(leaves.folder / "notice")
    run = cloud.folder / "shared/runs/Slow"
    wait_until(
        lambda: (run / "preempted.json").exists() or not job.is_running(), "the save", timeout_s=120
    )
    assert job.is_running(), job.text()
    marker = json.loads((run / "preempted.json").read_text())
    assert (marker["host"], marker["signal"]) == (leaves.name, f"a notice at {NOTICE}: {notice}")
    assert (checkpoints(cloud), 0 < marker["step"] < 400) == ([marker["step"]], True)
    job.wait_for("the ranks have saved", timeout_s=60)
    leaves.power_off()
    (kept, _), (new, new_address) = cloud.replace(taken)
    assert kept == first, "the others stay"
    cloud.boot(new, new_address)
    (cloud.job_folder / "hurry").touch()
    code = job.wait(timeout_s=150)
    text = job.text()
    assert code == 0, text[-3000:]
    assert (
        f"AWS took back {taken_address}; waiting for its replacement, then the run resumes" in text
    )
    assert "does not answer" not in text, (
        "AWS was asked to replace a node that it takes back itself"
    )
    assert f"[{stays.address} 0]" in text
    assert f"resumed at step {marker['step']} from /mnt/shared/runs/Slow/" in text, (
        "steps were lost"
    )
    assert checkpoints(cloud)[-1] == 400
    assert verify_run(run, lambda text: None).problems == []
