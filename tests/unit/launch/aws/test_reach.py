"""Clusters that cannot work are refused by `plan`, before they cost: no way in, no way out. On a
moto server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="make setup brings it")

from drumline.base.errors import UsageError
from drumline.launch.aws.account import Account
from drumline.launch.aws.cluster_access import check_session_manager
from drumline.launch.aws.cluster_plan import make_plan
from tests.unit.launch.aws.conftest import add_programs
from tests.unit.launch.aws.test_life_cycle import settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:Tried to parse", "ignore:.*utcnow", "ignore::ResourceWarning"
)
PRIVATE_STEP = (
    "give --ssm in place of --ssh-from, or a --subnet and the network of your VPN; or --no-efa"
)
CARDS = {"type": "p5.48xlarge", "nodes": 1}


def refusal(account: Account, **changes: Any) -> tuple[str, str | None]:
    with pytest.raises(UsageError) as error:
        make_plan(account, settings(account, **changes))
    return error.value.what, error.value.next_step


def test_a_cluster_without_a_way_in_is_refused(cloud: Account) -> None:
    assert refusal(cloud, key=None) == (
        "no --key is set, and `drumline aws launch` connects by ssh",
        "give --key NAME, an EC2 key pair, with --ssh-from me or --ssm",
    )
    assert refusal(cloud, ssh_from=None) == (
        "ssh would be closed: neither --ssh-from nor --ssm is set, so `drumline aws launch` could not connect",
        "give --ssh-from me, or --ssm",
    )
    assert refusal(cloud, subnet=None, **CARDS) == (
        "the instances get no public address in a new VPC, with 32 network cards each, so --ssh-from 192.0.2.7/32 "
        "cannot reach them",
        PRIVATE_STEP,
    )


def new_subnet(account: Account, gateway: str = "") -> str:
    """Of a VPC of its own, whose main route table has this gateway."""
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    place = {"CidrBlock": "10.1.0.0/24", "AvailabilityZone": "us-east-1a"}
    subnet = str(ec2.create_subnet(VpcId=vpc, **place)["Subnet"]["SubnetId"])
    if gateway:
        tables = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])[
            "RouteTables"
        ]
        route = {"DestinationCidrBlock": "0.0.0.0/0", "RouteTableId": tables[0]["RouteTableId"]}
        if gateway == "nat":
            nat = ec2.create_nat_gateway(SubnetId=subnet, ConnectivityType="private")["NatGateway"][
                "NatGatewayId"
            ]
            ec2.create_route(**route, NatGatewayId=nat)
        else:
            internet = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
            ec2.attach_internet_gateway(InternetGatewayId=internet, VpcId=vpc)
            ec2.create_route(**route, GatewayId=internet)
    return subnet


def test_a_subnet_without_a_way_out_is_refused(cloud: Account) -> None:
    isolated = new_subnet(cloud)
    assert refusal(cloud, subnet=isolated) == (
        f"the nodes, which install packages, could not reach the internet in {isolated}: its route table has no "
        "working route for it",
        "give a --subnet whose route is a NAT gateway, or no --subnet: up makes a VPC",
    )
    what, step = refusal(cloud, **CARDS)
    assert what.startswith(
        "the nodes, which install packages, could not reach the internet in subnet-"
    )
    assert what.endswith(", which needs public addresses, and these instances get none")
    assert step == "give a --subnet whose route is a NAT gateway, or no --subnet: up makes a VPC"
    without_addresses = new_subnet(cloud, "internet")
    what, _ = refusal(cloud, subnet=without_addresses, ssh_from="10.8.0.0/16")
    assert what.endswith("which needs public addresses, and these instances get none")


def test_a_private_subnet_is_reached_through_a_vpn_only(cloud: Account) -> None:
    private = new_subnet(cloud, "nat")
    assert make_plan(cloud, settings(cloud, subnet=private, ssh_from="10.8.0.0/16")).parameters[
        "VpcId"
    ]
    assert refusal(cloud, subnet=private, ssh_from="me") == (
        f"the instances get no public address in {private}, so --ssh-from me cannot reach them",
        PRIVATE_STEP,
    )
    assert refusal(cloud, subnet=private, ssh_from="8.8.8.0/24") == (
        f"the instances get no public address in {private}, so --ssh-from 8.8.8.0/24 cannot reach them",
        PRIVATE_STEP,
    )
    overlay = "100.64.0.0/10"  # of Tailscale and others: neither private nor public
    assert (
        make_plan(cloud, settings(cloud, subnet=private, ssh_from=overlay)).parameters["SshFrom"]
        == overlay
    )


def test_a_route_to_a_deleted_gateway_is_no_way_out(
    cloud: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS keeps such a route with the state `blackhole`, which moto does not have."""
    subnet = new_subnet(cloud, "nat")
    call_aws = cloud.all

    def with_deleted_gateway(service: str, operation: str, key: str, **arguments: Any) -> list[Any]:
        answer = list(call_aws(service, operation, key, **arguments))
        if operation == "describe_route_tables":
            for route in answer:
                if route.get("DestinationCidrBlock") == "0.0.0.0/0":
                    route["State"] = "blackhole"
        return answer

    monkeypatch.setattr(cloud, "all", with_deleted_gateway)
    what, _ = refusal(cloud, subnet=subnet, ssh_from="10.8.0.0/16")
    assert what.startswith(
        f"the nodes, which install packages, could not reach the internet in {subnet}: its route table"
    )


def test_session_manager_needs_its_programs_here(
    cloud: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    add_programs(tmp_path / "bin", monkeypatch, "aws")
    what, step = refusal(cloud, ssm=True, ssh_from=None)
    assert what == "--ssm needs session-manager-plugin on this machine, on the PATH"
    assert (step or "").startswith("install it: docs.aws.amazon.com/systems-manager/")
    assert (step or "").endswith("; or make the cluster with --ssh-from me")
    add_programs(tmp_path / "more", monkeypatch, "session-manager-plugin")
    check_session_manager("--ssm")
