"""An AWS account for tests: a moto server for what moto has, botocore's Stubber for what it has
not.

moto does not have the price list and the quotas of EC2: Stubber answers them as AWS documents it.
moto cannot delete a stack with a route table, so clusters are made in the default VPC. It creates a
stack within the request, ignores wait conditions, egress rules and placement groups, and knows
neither the deletion policy RetainExceptOnCreate nor the address of a mount target: here it gets
Retain, and the id of the target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.launch.aws import cluster_creation, stack
from drumline.launch.aws.account import Account
from tests.store_server import forget_all, shared_loader

WHY = "pip install 'drumline[dev]' brings it"
REGION = "us-east-1"
# One answer for every question: an hour costs 2 dollars, a GB 0.73 dollars a month.
PRICE = {
    "terms": {
        "OnDemand": {
            "SKU.TERM": {
                "priceDimensions": {
                    "a": {"unit": "Hrs", "pricePerUnit": {"USD": "2.0000000000"}},
                    "b": {"unit": "GB-Mo", "pricePerUnit": {"USD": "0.7300000000"}},
                    "c": {"unit": "Hrs", "pricePerUnit": {"USD": "0.0000000000"}},
                }
            }
        }
    }
}
MANY = 60
SECRET = "the-secret-of-this-account"
# To make a client takes longer than most tests: they are shared.
OFFLINE: dict[str, Any] = {}
ONLINE: dict[str, Any] = {}


@pytest.fixture(scope="session", name="session")
def make_session() -> Any:
    """One for all tests: it keeps what it has read of botocore's large files."""
    boto3 = pytest.importorskip("boto3", reason=WHY)
    return boto3.Session(aws_access_key_id="test", aws_secret_access_key=SECRET)


@pytest.fixture(name="account")
def make_account(session: Any, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Without a server: what is not stubbed fails."""
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("botocore.session.create_loader", shared_loader)
    offline_account = Account(session, REGION)
    offline_account._clients = OFFLINE
    return offline_account


@pytest.fixture(name="stub")
def make_stub(account: Account) -> Iterator[Callable[..., None]]:
    """`stub("ec2", "describe_images", {...})`: the answer, or with a string the error code, of the
    next such call."""
    stubber_of = pytest.importorskip("botocore.stub", reason=WHY).Stubber
    stubbers: dict[str, Any] = {}

    def stub(
        service: str, operation: str, answer: dict[str, Any] | str, times: int = 1, **expected: Any
    ) -> None:
        if service not in stubbers:
            stubbers[service] = stubber_of(account.client(service))
            stubbers[service].activate()
        for _ in range(times):
            if isinstance(answer, str):
                stubbers[service].add_client_error(
                    operation, answer, service_message=f"message of {answer}"
                )
            else:
                stubbers[service].add_response(operation, answer, expected or None)

    yield stub
    for stubber in stubbers.values():
        stubber.deactivate()


@pytest.fixture(name="cloud")
def make_cloud(
    aws_server: str,
    account: Account,
    stub: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Account:
    """An empty account on the server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    account._clients = ONLINE
    # moto would load 1,300 images and make an RSA key for every account.
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
    monkeypatch.setattr("moto.kms.models.generate_private_key", lambda spec: None)
    forget_all(aws_server)
    template = tmp_path / "cluster.yaml"
    text = cluster_creation.TEMPLATE.read_text().replace("RetainExceptOnCreate", "Retain")
    template.write_text(text.replace("!GetAtt MountTarget.IpAddress", "!Ref MountTarget"))
    monkeypatch.setattr(cluster_creation, "TEMPLATE", template)
    monkeypatch.setattr(stack, "POLL_S", 0.0)
    stub("pricing", "get_products", {"PriceList": [json.dumps(PRICE)]}, times=MANY)
    quota = {"QuotaName": "Running On-Demand G and VT instances", "Value": 96.0}
    stub("service-quotas", "get_service_quota", {"Quota": quota}, times=MANY)
    account.client("ec2").create_key_pair(KeyName="laptop", KeyType="ed25519")
    give_gateway(account)
    return account


def give_gateway(account: Account) -> None:
    """As in an account of AWS, the default VPC has a way to the internet; moto's has none."""
    ec2 = account.client("ec2")
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0][
        "VpcId"
    ]
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"][
        0
    ]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)


def add_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The PATH has these, and what it had before."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
