"""`drumline aws launch`: which commands it runs on which nodes, and what it does when AWS replaced
one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from drumline.base.errors import ConfigError, PreflightError, TrainingError, UsageError
from drumline.cli import aws_command
from drumline.launch.aws import cluster_settings
from drumline.launch.aws.account import Account
from drumline.launch.aws.own_wheels import build_wheel
from drumline.launch.aws.stack import TAG, CloudNode, ssh_config

Stub = Callable[..., None]


def instance(number: int, **fields: Any) -> dict[str, Any]:
    started = datetime(2026, 1, 1, 0, number, tzinfo=UTC)
    return {
        "InstanceId": f"i-{number}",
        "PrivateIpAddress": f"10.0.0.{number}",
        "LaunchTime": started,
        **fields,
    }


class Cluster:
    """The nodes that AWS has at each question, a stand-in for ssh, and the calls of doctor and
    launch."""

    def __init__(
        self, account: Account, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.stub = stub
        self.calls = []
        self.codes: list[int | Exception] = [0]
        self.log = tmp_path / "ssh.log"
        program = tmp_path / "ssh"
        program.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(cluster_settings, "connect", lambda region, profile: account)
        monkeypatch.setattr(aws_command, "POLL_S", 0.0)
        monkeypatch.setattr(aws_command.doctor_command, "run", self.doctor)
        monkeypatch.setattr(aws_command.launch_command, "run", self.launch)

    def is_lost(self, address: str, *, after: int, code: int = 255) -> None:
        """From the connection on that follows these. A code other than ssh's own is that of the
        node's command."""
        refusal = f'case "$*" in *"-- {address} "*) [ $(grep -c . {self.log}) -le {after} ] || exit {code};; esac'
        (self.log.parent / "ssh").write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{refusal}\n')

    def has(self, *instances: dict[str, Any]) -> None:
        self.stub("ec2", "describe_instances", {"Reservations": [{"Instances": list(instances)}]})

    def wants(self, nodes: int) -> None:
        group = {
            "AutoScalingGroupName": "drumline-train",
            "MinSize": 0,
            "MaxSize": 2,
            "DesiredCapacity": nodes,
        }
        group |= {
            "DefaultCooldown": 0,
            "AvailabilityZones": ["us-east-1a"],
            "HealthCheckType": "EC2",
            "CreatedTime": 0,
        }
        self.stub("autoscaling", "describe_auto_scaling_groups", {"AutoScalingGroups": [group]})

    def made(self, **changes: str) -> None:
        set_parameters = {
            "SessionManager": "false",
            "NodeCount": "2",
            "Market": "on-demand",
            "KeyName": "laptop",
            **changes,
        }
        parameters = [
            {"ParameterKey": name, "ParameterValue": value}
            for name, value in set_parameters.items()
        ]
        stack = {"StackName": "drumline-train", "CreationTime": 0, "StackStatus": "CREATE_COMPLETE"}
        stack["Tags"] = [{"Key": TAG, "Value": "train"}]
        self.stub(
            "cloudformation", "describe_stacks", {"Stacks": [{**stack, "Parameters": parameters}]}
        )

    def doctor(self, argv: Sequence[str]) -> int:
        self.calls.append(["doctor", *argv])
        return 0

    def launch(self, argv: Sequence[str], follow: Sequence[str]) -> int:
        self.calls.append(["launch", *argv])
        self.follow = list(follow)
        code = self.codes.pop(0)
        if isinstance(code, Exception):
            raise code
        return code


@pytest.fixture(name="cluster")
def make_cluster(
    account: Account, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    return Cluster(account, stub, tmp_path, monkeypatch)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_doctor_and_then_launch_on_the_private_addresses(cluster: Cluster) -> None:
    cluster.made()
    cluster.has(instance(2, PublicIpAddress="54.0.0.2"), instance(1, PublicIpAddress="54.0.0.1"))
    assert (
        aws_command.run(
            [
                *("launch", "--name", "train", "--procs", "4", "--identity", "my key"),
                *("digits", "--train.epochs", "3"),
            ]
        )
        == 0
    )
    words = ("drumline", "aws", "{verb}", "{job}", "--name", "train", "--identity", "my key")
    assert cluster.follow == list(words)
    doctor, launch = cluster.calls
    for words in (doctor, launch):
        assert after(words, "--hosts") == "10.0.0.1,10.0.0.2", "the oldest node has rank 0"
        assert after(words, "--python") == "/opt/drumline/bin/python"
        assert after(words, "--ssh").startswith("ssh -F /")
    assert launch[7:] == [
        *("--sync", "--detach", "--procs=4", "digits", "--train.epochs", "3"),
        *("--run", "/mnt/shared/runs/digits"),
    ]
    prepared = sorted(line.split(" -- ")[1] for line in cluster.log.read_text().splitlines())
    command = f"env --chdir=/ sudo /opt/drumline/prepare {Path.cwd()}"
    assert prepared == [f"10.0.0.1 {command}", f"10.0.0.2 {command}"], "both at once"


def test_drumline_itself_is_copied_to_every_node_with_its_hash(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No package index has it: what runs here goes through ssh, to a program that checks the hash
    (test_node.py)."""
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\necho "$@" >> {cluster.log}\ncat > {tmp_path}/$$.received\n'
    )
    cluster.made(CopiesDrumline="true")
    cluster.has(instance(1), instance(2))
    assert aws_command.run(["launch", "--no-doctor", "digits"]) == 0
    digests = [line.split()[-2] for line in cluster.log.read_text().splitlines()]
    received = [path.read_bytes() for path in tmp_path.glob("*.received")]
    assert [hashlib.sha256(content).hexdigest() for content in received] == digests
    assert received == [build_wheel().content] * 2


def test_a_node_that_refuses_the_wheels_ends_the_launch(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\ncat > /dev/null\necho 'they do not have the SHA-256 x' >&2\nexit 65\n"
    )
    cluster.made(CopiesDrumline="true", NodeCount="1")
    cluster.has(instance(1))
    with pytest.raises(PreflightError) as error:
        aws_command.run(["launch", "--no-doctor", "digits"])
    assert (error.value.what, error.value.next_step) == (
        "10.0.0.1 (i-1): drumline could not be installed: they do not have the SHA-256 x",
        "run the same command again; if it stays, `drumline aws down`, then up",
    )


def test_a_script_and_spot_nodes(cluster: Cluster) -> None:
    cluster.made(Market="spot", NodeCount="1")
    cluster.has(instance(1))
    assert aws_command.run(["launch", "--no-doctor", "--no-sync", "train.py", "--run", "x"]) == 0
    cluster.made(Market="spot", NodeCount="1")
    cluster.has(instance(1))
    cluster.codes = [0]
    assert aws_command.run(["launch", "--no-doctor", "digits", "--run", "/mnt/shared/runs/7"]) == 0
    script, task = cluster.calls
    assert script[7:] == [
        "--detach",
        "--env=OUTPUT_DIR=/mnt/shared/runs",
        "--sync=false",
        "train.py",
        "--run",
        "x",
    ]
    assert task[7:] == [
        "--sync",
        "--detach",
        "digits",
        "--run",
        "/mnt/shared/runs/7",
        "--watch.notice",
        aws_command.NOTICE,
    ]


def test_a_replaced_node_joins_and_the_run_resumes(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.made()
    cluster.has(instance(1), instance(2))
    cluster.codes = [TrainingError("the connection to 10.0.0.2 was lost"), 0]
    cluster.has(instance(1))
    cluster.has(instance(1))
    cluster.wants(2)
    cluster.has(instance(1), instance(3))
    assert aws_command.run(["launch", "--no-doctor", "digits", "--fresh"]) == 0
    assert [after(words, "--hosts") for words in cluster.calls] == [
        "10.0.0.1,10.0.0.2",
        "10.0.0.1,10.0.0.3",
    ]
    assert ["--fresh" in words for words in cluster.calls] == [True, False]
    assert (
        "AWS took back 10.0.0.2; waiting for its replacement, then the run resumes"
        in capsys.readouterr().err
    )


def test_nodes_that_ended_for_good_are_not_waited_for(cluster: Cluster) -> None:
    cluster.made()
    cluster.has(instance(1), instance(2))
    cluster.codes = [TrainingError("the connection to 10.0.0.2 was lost")]
    cluster.has()
    cluster.has()
    cluster.wants(0)
    with pytest.raises(PreflightError) as error:
        aws_command.run(["launch", "--no-doctor", "digits"])
    assert (error.value.what, error.value.next_step) == (
        "0 of 2 nodes run, and AWS starts no other: they ended when they were idle, or the time of the cluster is over",
        "drumline aws up --name train starts them again, if its time is not over; the same command then resumes",
    )


def test_a_node_that_does_not_answer_is_reported_to_aws(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.made()
    for _ in range(2):
        cluster.has(instance(1), instance(2))
    cluster.codes = [TrainingError("the connection to 10.0.0.2 was lost"), 0]
    cluster.is_lost("10.0.0.2", after=2)
    lost = {"InstanceId": "i-2", "HealthStatus": "Unhealthy", "ShouldRespectGracePeriod": False}
    cluster.stub("autoscaling", "set_instance_health", {}, **lost)
    cluster.has(instance(1))
    cluster.has(instance(1), instance(3))
    assert aws_command.run(["launch", "--no-doctor", "digits"]) == 0
    assert [after(words, "--hosts") for words in cluster.calls] == [
        "10.0.0.1,10.0.0.2",
        "10.0.0.1,10.0.0.3",
    ]
    shown = capsys.readouterr().err
    assert "10.0.0.2 (i-2) does not answer: asking AWS to replace it\n" in shown
    assert "AWS took back 10.0.0.2; waiting for its replacement, then the run resumes\n" in shown


def test_a_node_that_answers_with_an_error_is_not_replaced(cluster: Cluster) -> None:
    cluster.made()
    for _ in range(2):
        cluster.has(instance(1), instance(2))
    cluster.codes = [TrainingError("rank 3 crashed")]
    cluster.is_lost("10.0.0.2", after=2, code=1)
    with pytest.raises(TrainingError, match="rank 3 crashed"):
        aws_command.run(["launch", "--no-doctor", "digits"])


def test_where_no_node_answers_none_is_replaced(cluster: Cluster) -> None:
    """The fault may be this machine's own network."""
    cluster.made(NodeCount="1")
    for _ in range(2):
        cluster.has(instance(1))
    cluster.codes = [TrainingError("the connection to 10.0.0.1 was lost")]
    cluster.is_lost("10.0.0.1", after=1)
    with pytest.raises(TrainingError, match=r"the connection to 10.0.0.1 was lost"):
        aws_command.run(["launch", "--no-doctor", "digits"])


def test_a_failure_on_the_same_nodes_is_reported_once(cluster: Cluster) -> None:
    cluster.made()
    for _ in range(2):
        cluster.has(instance(1), instance(2))
    cluster.codes = [TrainingError("rank 3 crashed")]
    with pytest.raises(TrainingError, match="rank 3 crashed"):
        aws_command.run(["launch", "--no-doctor", "digits"])
    cluster.made()
    for _ in range(2):
        cluster.has(instance(1), instance(2))
    cluster.codes = [75]
    assert aws_command.run(["launch", "--no-doctor", "digits"]) == 75


def test_a_spot_notice_waits_for_the_node_to_go(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.made(Market="spot")
    cluster.has(instance(1), instance(2))
    cluster.codes = [75, 0]
    cluster.has(instance(1), instance(2))
    cluster.has(instance(2))
    cluster.has(instance(2), instance(4))
    assert aws_command.run(["launch", "--no-doctor", "digits"]) == 0
    assert [after(words, "--hosts") for words in cluster.calls] == [
        "10.0.0.1,10.0.0.2",
        "10.0.0.2,10.0.0.4",
    ]
    assert "waiting for AWS to take the node back, at most 3 minutes\n" in capsys.readouterr().err


def test_what_launch_cannot_use(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"- --hosts: the cluster's nodes are the hosts\n.*- no TASK or SCRIPT.py was given",
    ):
        aws_command.run(["launch", "--hosts", "a,b"])
    cluster.stub("cloudformation", "describe_stacks", "ValidationError")
    with pytest.raises(UsageError, match="the cluster train does not exist in us-east-1"):
        aws_command.run(["launch", "digits"])
    monkeypatch.setattr(aws_command, "READY_S", 0.0)
    cluster.made()
    cluster.has(instance(1))
    cluster.wants(2)
    with pytest.raises(PreflightError, match="1 of 2 nodes run after 0 minutes"):
        aws_command.run(["launch", "digits"])
    cluster.made()
    cluster.has(instance(1), instance(2))
    (cluster.log.parent / "ssh").write_text(
        "#!/bin/sh\necho 'ssh: connect to host x: Connection timed out' >&2; exit 255\n"
    )
    with pytest.raises(PreflightError, match=r"10.0.0.2: it is unreachable"):
        aws_command.run(["launch", "digits"])


def test_what_doctor_finds_stops_the_launch(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.made()
    cluster.has(instance(1), instance(2))
    monkeypatch.setattr(aws_command.doctor_command, "run", lambda argv: 3)
    with pytest.raises(
        PreflightError, match=r"doctor found something to fix on the nodes \(exit code 3\)"
    ):
        aws_command.run(["launch", "digits"])
    assert cluster.calls == []


def test_the_ssh_config_names_nodes_by_their_private_addresses(
    account: Account, tmp_path: Path
) -> None:
    """Read back by OpenSSH itself."""
    import subprocess

    node = CloudNode(id="i-1", address="10.0.0.1", public_address="54.0.0.1")
    file = tmp_path / "config"
    modules = {
        False: "hostname 54.0.0.1",
        True: "proxycommand aws ssm start-session --region us-east-1 --target i-1",
    }
    for by_ssm, line in modules.items():
        file.write_text(ssh_config(account, [node], by_ssm=by_ssm, profile="work"))
        done = subprocess.run(
            ["ssh", "-G", "-F", str(file), "10.0.0.1"], capture_output=True, text=True, check=True
        )
        assert any(printed_line.startswith(line) for printed_line in done.stdout.splitlines()), (
            done.stdout
        )
        assert {"user ubuntu", "hostkeyalias i-1"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["jobs"], []),
        (["attach", "digits-1a2b3c"], ["digits-1a2b3c"]),
        (["stop", "digits-1a2b3c", "--save"], ["--save", "digits-1a2b3c"]),
    ],
)
def test_jobs_are_followed_on_the_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, words: list[str], arguments: list[str]
) -> None:
    cluster.made()
    cluster.has(instance(1), instance(2))
    calls = []

    def run(argv: Sequence[str]) -> int:
        calls.append(list(argv))
        return 75

    monkeypatch.setattr(aws_command.FOLLOWERS[words[0]], "run", run)
    assert aws_command.run([*words, "--identity", "key"]) == 75
    assert not cluster.log.exists(), "nothing is installed on them"
    ((*hosts, ssh, python_flag, python), rest) = calls[0][:6], calls[0][6:]
    assert hosts == ["--hosts", "10.0.0.1,10.0.0.2", "--ssh"]
    assert ssh.endswith("ssh_config -i key")
    assert [python_flag, python] == ["--python", "/opt/drumline/bin/python"]
    assert rest == arguments


def test_with_attach_the_launch_stays(cluster: Cluster) -> None:
    cluster.made()
    cluster.has(instance(1), instance(2))
    assert aws_command.run(["launch", "--no-doctor", "--attach", "digits"]) == 0
    assert "--detach" not in cluster.calls[0]
