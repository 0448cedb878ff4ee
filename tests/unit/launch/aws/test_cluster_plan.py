"""What a plan makes of settings: the parameters, and the resources that the template has with
them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from drumline.base.errors import MissingExtraError
from drumline.launch.aws import cluster_access, cluster_plan
from drumline.launch.aws.account import Account, connect
from drumline.launch.aws.cluster_access import own_network
from drumline.launch.aws.cluster_creation import TEMPLATE, _request
from drumline.launch.aws.cluster_plan import ClusterPlan
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.instance_type import Hardware, find_hardware, find_image
from drumline.launch.aws.prices import UNKNOWN, fixed_cost
from drumline.launch.aws.stack import status_lines
from tests.unit.launch.aws.test_template import load

Stub = Callable[..., None]
G6 = Hardware(
    arch="x86_64",
    num_vcpus=48,
    num_gpus=4,
    gpu="L4",
    num_efas=1,
    num_cards=1,
)
SUBNET = {"VpcId": "vpc-1", "AvailabilityZone": "us-east-1a", "MapPublicIpOnLaunch": True}
NETWORK = {
    "Vpc",
    "Gateway",
    "GatewayAttachment",
    "Subnet",
    "Routes",
    "SubnetRoutes",
    "RouteByGateway",
    "S3Endpoint",
}
ALWAYS = {
    *(
        "Group",
        "GroupIngress",
        "GroupEgress",
        "Role",
        "Profile",
        "LaunchTemplate",
        "Nodes",
        "End",
        "Signal",
        "Ready",
    ),
    *("Volume", "MountTarget"),
}


def settled(value: Any, parameters: dict[str, str], conditions: dict[str, Any]) -> Any:
    """A template's value as CloudFormation computes it, apart from references to resources."""
    if isinstance(value, list):
        return [
            resolved
            for item in value
            if (resolved := settled(item, parameters, conditions)) is not None
        ]
    if not isinstance(value, dict):
        return value
    (name, inner), *further_items = value.items() if value else [("", None)]
    if not further_items and name == "Ref" and inner in parameters:
        return parameters[inner]
    if not further_items and name == "Ref" and inner == "AWS::NoValue":
        return None
    if not further_items and name == "Condition":
        return settled(conditions[inner], parameters, conditions)
    if not further_items and name in ("Fn::Equals", "Fn::Not", "Fn::And"):
        parts = settled(inner, parameters, conditions)
        return {"Fn::Equals": lambda: parts[0] == parts[1], "Fn::Not": lambda: not parts[0]}.get(
            name, lambda: all(parts)
        )()
    if not further_items and name == "Fn::If":
        return settled(
            inner[1 if settled(conditions[inner[0]], parameters, conditions) else 2],
            parameters,
            conditions,
        )
    resolved_items = {
        key: settled(item_value, parameters, conditions) for key, item_value in value.items()
    }
    return {key: item_value for key, item_value in resolved_items.items() if item_value is not None}


def resources(parameters: dict[str, str]) -> dict[str, Any]:
    """Those that are made, with their properties."""
    template = load(TEMPLATE.read_text())
    conditions = template["Conditions"]
    return {
        name: settled(resource.get("Properties", {}), parameters, conditions)
        for name, resource in template["Resources"].items()
        if "Condition" not in resource
        or settled(conditions[resource["Condition"]], parameters, conditions)
    }


@pytest.fixture(name="made")
def make_made(account: Account, stub: Stub) -> Callable[..., dict[str, Any]]:
    def made(hardware: Hardware = G6, **changes: Any) -> dict[str, Any]:
        stub("efs", "describe_file_systems", {"FileSystems": []})
        subnet = SUBNET if "subnet" in changes else {}
        settings = ClusterSettings(type="g6.12xlarge", **changes)
        return resources(
            cluster_plan._parameters(
                account, settings, hardware, subnet, is_public=hardware.num_cards == 1
            )
            | {"Zone": "us-east-1a", "Market": settings.market}
        )

    return made


def test_what_is_not_asked_for_is_not_made(made: Callable[..., dict[str, Any]]) -> None:
    cluster = made()
    assert cluster.keys() == NETWORK | ALWAYS
    launched = cluster["LaunchTemplate"]["LaunchTemplateData"]
    assert not {"KeyName", "InstanceMarketOptions"} & launched.keys()
    assert "PlacementGroup" not in cluster["Nodes"], "it is forced on nobody"
    (interface,) = launched["NetworkInterfaces"]
    assert (interface["InterfaceType"], interface["AssociatePublicIpAddress"]) == ("efa", True)


@pytest.mark.parametrize(
    ("changes", "added", "removed"),
    [
        ({"placement_group": True}, {"Placement"}, set()),
        ({"ssh_from": "192.0.2.7/32"}, {"SshIngress"}, set()),
        ({"ssm": True}, {"SessionRights"}, set()),
        ({"bucket": "my-data"}, {"BucketRights"}, set()),
        ({"subnet": "subnet-1"}, set(), NETWORK),
    ],
)
def test_what_is_asked_for_is_made(
    made: Callable[..., dict[str, Any]], changes: dict[str, Any], added: set[str], removed: set[str]
) -> None:
    cluster = made(**changes)
    assert cluster.keys() == (NETWORK | ALWAYS | added) - removed
    assert ("PlacementGroup" in cluster["Nodes"]) == ("placement_group" in changes)
    assert cluster["Nodes"]["VPCZoneIdentifier"] == [changes.get("subnet", {"Ref": "Subnet"})]


def test_spot_instances_with_a_ceiling(made: Callable[..., dict[str, Any]]) -> None:
    market = made(spot=True, max_price=3.5)["LaunchTemplate"]["LaunchTemplateData"][
        "InstanceMarketOptions"
    ]
    limits = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    assert market == {"MarketType": "spot", "SpotOptions": {**limits, "MaxPrice": "3.5"}}
    market = made(spot=True)["LaunchTemplate"]["LaunchTemplateData"]["InstanceMarketOptions"]
    assert market["SpotOptions"] == limits


@pytest.mark.parametrize(("efa", "num_efas", "num_cards"), [(None, 4, 4), (False, 0, 1)])
def test_without_efa_one_network_card_is_used(
    account: Account, stub: Stub, efa: bool | None, num_efas: int, num_cards: int
) -> None:
    network = {"EfaInfo": {"MaximumEfaInterfaces": 4}, "MaximumNetworkCards": 4}
    described = {
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": 96},
        "NetworkInfo": network,
    }
    stub("ec2", "describe_instance_types", {"InstanceTypes": [described]})
    hardware = find_hardware(account, ClusterSettings(type="p4d.24xlarge", efa=efa))
    assert (hardware.num_efas, hardware.num_cards) == (num_efas, num_cards)


def test_a_key_and_no_efa(made: Callable[..., dict[str, Any]]) -> None:
    without_efa = Hardware(**{**vars(G6), "num_efas": 0})
    launched = made(without_efa, key="laptop")["LaunchTemplate"]["LaunchTemplateData"]
    assert (launched["KeyName"], launched["NetworkInterfaces"][0]["InterfaceType"]) == (
        "laptop",
        "interface",
    )


def test_several_network_cards_reach_the_internet_by_a_nat_gateway(
    made: Callable[..., dict[str, Any]],
) -> None:
    cluster = made(Hardware(**{**vars(G6), "num_efas": 4, "num_cards": 4}))
    nat = {
        "Nat",
        "NatAddress",
        "NatSubnet",
        "NatRoutes",
        "NatSubnetRoutes",
        "NatRouteByGateway",
        "RouteByNat",
    }
    assert cluster.keys() == (NETWORK | ALWAYS | nat) - {"RouteByGateway"}


def test_a_volume_that_is_mounted_in_the_zone_gets_a_rule_and_nothing_else() -> None:
    set_parameters = {
        "VpcId": "vpc-1",
        "SubnetId": "subnet-1",
        "VolumeId": "fs-1",
        "MountTargetAddress": "10.0.0.9",
    }
    empty_parameters = dict.fromkeys(load(TEMPLATE.read_text())["Parameters"], "")
    cluster = resources({**empty_parameters, **set_parameters, "MountTargetGroup": "sg-9"})
    assert cluster.keys() == ALWAYS - {"Volume", "MountTarget"} | {
        "OldVolumeIngress",
        "OldVolumeEgress",
    }
    assert cluster["OldVolumeIngress"]["GroupId"] == "sg-9"
    assert (cluster["OldVolumeIngress"]["FromPort"], cluster["OldVolumeIngress"]["ToPort"]) == (
        2049,
        2049,
    )


def test_aws_itself_keeps_the_time_limit(made: Callable[..., dict[str, Any]]) -> None:
    end = made(hours=1.5)["End"]
    left = datetime.fromisoformat(end["StartTime"]) - datetime.now(UTC)
    assert timedelta(hours=1.4) < left <= timedelta(hours=1.5)
    assert (end["MinSize"], end["MaxSize"], end["DesiredCapacity"]) == (0, 0, 0)
    assert end["AutoScalingGroupName"] == {"Ref": "Nodes"}


def test_everything_is_tagged_and_a_failed_stack_deletes_itself(
    made: Callable[..., dict[str, Any]],
) -> None:
    """AWS gives the tags of a stack to its resources; what the group starts has them from here."""
    plan = ClusterPlan(
        settings=ClusterSettings(name="t"),
        hardware=G6,
        parameters={"Owner": ""},
        costs=(fixed_cost("nodes", 4.5),),
        volume_price=UNKNOWN,
        notes=(),
        unknowns=(),
        other_zones={},
    )
    request = _request(plan)
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    prices = {"drumline:nodes-usd-per-hour": "4.500000", "drumline:stack-usd-per-hour": "0.000000"}
    assert (tags, request["OnFailure"]) == ({"drumline:cluster": "t", **prices}, "DELETE")
    cluster = made(name="t")
    tag = {"Key": "drumline:cluster", "Value": "t"}
    owner = {"Key": "drumline:owner", "Value": {"Ref": "Owner"}}
    for common_tag in (tag, owner):
        assert {**common_tag, "PropagateAtLaunch": True} in cluster["Nodes"]["Tags"]
    (disks,) = cluster["LaunchTemplate"]["LaunchTemplateData"]["TagSpecifications"]
    assert disks == {"ResourceType": "volume", "Tags": [tag, owner]}


def test_instances_without_gpus_get_ubuntu(account: Account, stub: Stub) -> None:
    name = "/aws/service/canonical/ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3/ami-id"
    stub("ssm", "get_parameter", {"Parameter": {"Value": "ami-1"}}, Name=name)
    stub(
        "ec2",
        "describe_images",
        {"Images": [{"ImageId": "ami-1"}]},
        ImageIds=["ami-1"],
    )
    hardware = Hardware(**{**vars(G6), "arch": "arm64", "num_gpus": 0})
    assert find_image(account, None, hardware)["ImageId"] == "ami-1"


def test_ssh_from_me_is_the_address_that_aws_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    class Address(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"192.0.2.7\n")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Address) as server:
        monkeypatch.setattr(
            cluster_access, "ADDRESS_URL", f"http://127.0.0.1:{server.server_port}/"
        )
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert own_network() == "192.0.2.7/32"
        thread.join()


def test_status_lists_every_cluster_and_what_it_has_cost(account: Account, stub: Stub) -> None:
    def stack(name: str, hours: float, price: str, tag: str = "drumline:cluster") -> dict[str, Any]:
        parameters = {
            "NodeCount": "2",
            "InstanceType": "g6.12xlarge",
            "Market": "spot",
            "Zone": "us-east-1a",
        }
        parameters["EndsAt"] = "2099-01-01T00:00:00Z"
        costs = {"drumline:nodes-usd-per-hour": price, "drumline:stack-usd-per-hour": "0"}
        return {
            "StackName": f"drumline-{name}",
            "StackStatus": "CREATE_COMPLETE",
            "CreationTime": datetime.now(UTC) - timedelta(hours=hours),
            "Parameters": [
                {"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()
            ],
            "Tags": [{"Key": key, "Value": value} for key, value in {tag: name, **costs}.items()],
        }

    stacks = [stack("new", 1, "1"), stack("other", 1, "9", tag="theirs"), stack("old", 100, "4")]
    stub("cloudformation", "describe_stacks", {"Stacks": stacks})
    for _ in range(2):
        stub("ec2", "describe_instances", {"Reservations": []})
    stub("efs", "describe_file_systems", {"FileSystems": []})
    old, old_owner, new, _, count = status_lines(account)
    assert old_owner.startswith("  made by an unknown identity at 20")
    assert old.startswith(
        "old: CREATE_COMPLETE, 0 of 2 x g6.12xlarge (spot) run in us-east-1a since 4"
    )
    assert "; so far at most $400.0" in old
    assert (
        "; so far at most $1.00, beside EFS and traffic; ends at 2099-01-01T00:00:00Z at the latest"
        in new
    )
    assert count == "2 clusters in us-east-1"


def test_boto3_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        MissingExtraError, match=r"drumline aws needs a package[\s\S]*pip install 'boto3>=1.35'"
    ):
        connect("us-east-1", None)
