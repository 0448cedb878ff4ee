"""Clusters and stacks of others, on a moto server: `drumline aws` leaves them alone and says whose
they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("moto", reason="make setup brings it")

from drumline.base.errors import UsageError
from drumline.cli import aws_command
from drumline.launch.aws import cluster_settings
from drumline.launch.aws.account import Account
from drumline.launch.aws.cluster_creation import bring_up
from drumline.launch.aws.cluster_plan import make_plan
from drumline.launch.aws.stack import TAG, find_stack, nodes_of, tags_of
from tests.unit.launch.aws.test_life_cycle import quiet, settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:Tried to parse", "ignore:.*utcnow", "ignore::ResourceWarning"
)
TOPIC = json.dumps({"Resources": {"Topic": {"Type": "AWS::SNS::Topic"}}})
Connect = Callable[[Account], None]


@pytest.fixture(name="connect")
def make_connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    def connect(account: Account) -> None:
        monkeypatch.setattr(cluster_settings, "connect", lambda region, profile: account)

    return connect


def make_stack(account: Account, **tags: str) -> None:
    """`drumline-t`, as another program makes one."""
    named = [{"Key": key, "Value": value} for key, value in tags.items()]
    account.call(
        "cloudformation", "create_stack", StackName="drumline-t", TemplateBody=TOPIC, Tags=named
    )


def colleague(account: Account, session: Any) -> Account:
    """Another user of the same account."""
    iam = account.client("iam")
    iam.create_user(UserName="jane")
    key = iam.create_access_key(UserName="jane")["AccessKey"]
    keys = {
        "aws_access_key_id": key["AccessKeyId"],
        "aws_secret_access_key": key["SecretAccessKey"],
    }
    jane = Account(type(session)(**keys), account.region)
    for service in ("pricing", "service-quotas"):  # Stubber answers these
        jane._clients[service] = account.client(service)
    return jane


@pytest.mark.parametrize("tags", [{}, {TAG: "other"}])
def test_a_stack_that_drumline_did_not_make_is_refused_by_every_verb(
    cloud: Account, connect: Connect, capsys: pytest.CaptureFixture[str], tags: dict[str, str]
) -> None:
    make_stack(cloud, **tags)
    connect(cloud)
    where = ["--region", cloud.region, "--name", "t"]
    made = ["--type", "g4dn.xlarge"]
    refused: list[Callable[[], object]] = [
        lambda: aws_command.run(["plan", *where, *made]),
        lambda: aws_command.run(["up", *where, *made]),
        lambda: aws_command.run(["launch", *where, "digits"]),
        lambda: aws_command.run(["down", *where, "--delete-data", "--any-owner"]),
    ]
    for call in refused:
        with pytest.raises(UsageError) as error:
            call()
        what = error.value.what
        assert what.startswith("the stack drumline-t in us-east-1, made 20"), what
        assert what.endswith(
            " UTC, is not a cluster of drumline: it has no tag drumline:cluster=t; it was left alone"
        ), what
        assert error.value.next_step == (
            "give another --name; if the stack is yours, delete it with the program that made it"
        )
    assert aws_command.run(["status", *where]) == 0
    assert capsys.readouterr().out == "0 clusters in us-east-1\n"
    assert find_stack(cloud, "drumline-t") is not None


def test_down_refuses_to_remove_what_another_identity_made(
    cloud: Account,
    session: Any,
    connect: Connect,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jane = colleague(cloud, session)
    bring_up(jane, make_plan(jane, settings(jane)), quiet)
    stack = find_stack(cloud, "drumline-t")
    assert stack is not None
    assert tags_of(stack)["drumline:owner"] == "arn:aws:iam::123456789012:user/jane"
    connect(cloud)
    down = ["down", "--region", cloud.region, "--name", "t"]
    who = "the cluster t was made by arn:aws:iam::123456789012:user/jane at 20"

    with pytest.raises(UsageError) as error:
        aws_command.run(down)
    assert error.value.what.startswith(who)
    assert error.value.what.endswith(
        "and you are arn:aws:sts::123456789012:user/moto; nothing was removed"
    )
    assert error.value.next_step == (
        "ask whoever made it; to remove it all the same: drumline aws down --name t "
        f"--region {cloud.region} --any-owner"
    )

    assert len(nodes_of(cloud, "t")) == 2
    assert aws_command.run([*down, "--any-owner"]) == 0
    assert nodes_of(cloud, "t") == []

    # The volume with jane's data is hers too.
    with pytest.raises(
        UsageError,
        match=r"the volume fs-.*, with its data, was made by arn:aws:iam::.*:user/jane at",
    ):
        aws_command.run([*down, "--delete-data"])
    capsys.readouterr()
    assert aws_command.run([*down, "--delete-data", "--any-owner"]) == 0
    assert cloud.all("efs", "describe_file_systems", "FileSystems") == []


def test_status_shows_who_made_a_cluster(
    cloud: Account, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    bring_up(cloud, make_plan(cloud, settings(cloud)), quiet)
    connect(cloud)
    assert aws_command.run(["status", "--region", cloud.region]) == 0
    assert "  made by arn:aws:sts::123456789012:user/moto at 20" in capsys.readouterr().out


def test_a_session_that_boto3_named_is_its_role(
    account: Account, stub: Callable[..., None]
) -> None:
    """By Stubber: moto has one identity for a key. A comma cannot be in a tag."""
    role = "arn:aws:sts::123456789012:assumed-role/train"
    for name, identity in [
        (f"{role}/botocore-session-1763421498", role),
        (f"{role}/jane@example.com", f"{role}/jane@example.com"),
        (f"{role}/jane,laptop", f"{role}/jane_laptop"),
    ]:
        stub("sts", "get_caller_identity", {"Arn": name, "Account": "123456789012", "UserId": "x"})
        assert account.identity() == identity
