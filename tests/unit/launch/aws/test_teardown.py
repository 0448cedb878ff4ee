"""`down` of a cluster in a new VPC. moto cannot delete a route table, so Stubber answers as AWS
documents it, and the order in which CloudFormation deletes is read from the template: what depends
on something is deleted before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from botocore import client as boto_client
from botocore import xform_name

from drumline.launch.aws import stack, teardown
from drumline.launch.aws.account import Account, AwsError
from drumline.launch.aws.cluster_creation import TEMPLATE
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.teardown import take_down
from tests.unit.launch.aws.test_template import load, walk

Stub = Callable[..., None]
STACK = "arn:aws:cloudformation:us-east-1:123456789012:stack/drumline-t/1"
SETTINGS = ClusterSettings(name="t")


# The order


def needed_by(resources: dict[str, Any], name: str) -> Iterator[str]:
    """What it names, by Ref, GetAtt, Sub or DependsOn, and what that names."""
    resource = resources[name]
    direct = resource.get("DependsOn", [])
    needed = set(direct if isinstance(direct, list) else [direct])
    for mapping in walk(resource.get("Properties", {})):
        needed |= {
            str(value).partition(".")[0]
            for key, value in mapping.items()
            if key in ("Ref", "Fn::GetAtt")
        }
    for resource_name in needed & resources.keys():
        yield resource_name
        yield from needed_by(resources, resource_name)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        # A gateway with mapped public addresses cannot be detached; an address in use cannot be
        # released.
        (
            "Nodes",
            {"GatewayAttachment", "RouteByNat", "RouteByGateway", "SubnetRoutes", "Placement"},
        ),
        (
            "Nat",
            {
                "NatAddress",
                "NatSubnet",
                "NatSubnetRoutes",
                "NatRouteByGateway",
                "GatewayAttachment",
            },
        ),
        ("GatewayAttachment", {"Gateway", "Vpc"}),
        # Subnets and groups with interfaces in them cannot be deleted: those of nodes and of the
        # volume.
        ("Nodes", {"Subnet", "Group", "MountTarget", "Profile"}),
        ("MountTarget", {"Subnet", "Group", "Volume"}),
        ("Group", {"Vpc"}),
        ("Routes", {"Vpc"}),
        ("S3Endpoint", {"Vpc", "Routes"}),
        ("BucketRights", {"Role"}),
        ("NatSubnet", {"Vpc"}),
        ("Profile", {"Role"}),
        ("SessionRights", {"Role"}),
        ("End", {"Nodes"}),
        ("Ready", {"Nodes"}),
    ],
)
def test_what_blocks_a_deletion_is_deleted_before(name: str, needs: set[str]) -> None:
    needed = set(needed_by(load(TEMPLATE.read_text())["Resources"], name))
    assert needs <= needed, needs - needed


# The calls


class Cloud:
    """The answers of an account with a new VPC, a NAT gateway and a volume, and the order of the
    calls."""

    def __init__(self, account: Account, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        self.account = account
        self._stub = stub
        self.calls = list[str]()
        call = boto_client.BaseClient._make_api_call

        def noted(client: Any, operation: str, arguments: Any) -> Any:
            self.calls.append(xform_name(operation))
            return call(client, operation, arguments)

        monkeypatch.setattr(boto_client.BaseClient, "_make_api_call", noted)
        monkeypatch.setattr(stack, "POLL_S", 0.0)

    def begins_in(self, state: str = "CREATE_COMPLETE") -> None:
        self.is_in(state, by="drumline-t")
        self.is_deleted()

    def is_in(self, *states: str, by: str = STACK) -> None:
        for state in states:
            described = {
                "StackId": STACK,
                "StackName": "drumline-t",
                "CreationTime": 5,
                "StackStatus": state,
            }
            described["Tags"] = [{"Key": stack.TAG, "Value": "t"}]
            self._stub("cloudformation", "describe_stacks", {"Stacks": [described]}, StackName=by)
            if state == "DELETE_IN_PROGRESS":
                event = {
                    "StackId": STACK,
                    "EventId": "e",
                    "StackName": "drumline-t",
                    "Timestamp": 0,
                }
                group_event = {**event, "LogicalResourceId": "Group", "ResourceStatus": state}
                self._stub(
                    "cloudformation",
                    "describe_stack_events",
                    {"StackEvents": [group_event]},
                    StackName=STACK,
                )

    def is_deleted(self) -> None:
        self._stub("cloudformation", "delete_stack", {}, StackName=STACK)

    def cannot_delete(self) -> None:
        """As AWS answers while an interface is still in the group."""
        reason = "resource sg-1 has a dependent object (Service: Ec2, Status Code: 400, DependencyViolation)"
        common_fields = {"ResourceType": "AWS::EC2::SecurityGroup", "LastUpdatedTimestamp": 0}
        group = {
            "LogicalResourceId": "Group",
            "PhysicalResourceId": "sg-1",
            "ResourceStatus": "DELETE_FAILED",
        }
        network = {
            "LogicalResourceId": "Nat",
            "PhysicalResourceId": "nat-1",
            "ResourceStatus": "DELETE_COMPLETE",
        }
        events = [
            {**common_fields, **group, "ResourceStatusReason": reason},
            {**common_fields, **network},
        ]
        answer = {"StackResourceSummaries": events}
        self._stub("cloudformation", "list_stack_resources", answer, StackName=STACK)

    def has_left(
        self, *, node: str = "terminated", disks: list[str] | None = None, nat: str = "deleted"
    ) -> None:
        """What has the tag: instances and NAT gateways are shown for an hour after their end."""
        instance = {"InstanceId": "i-1", "State": {"Name": node}}
        volumes = [{"VolumeId": disk, "State": "in-use"} for disk in disks or []]
        self._stub("ec2", "describe_instances", {"Reservations": [{"Instances": [instance]}]})
        self._stub("ec2", "describe_volumes", {"Volumes": volumes})
        self._stub("ec2", "describe_addresses", {"Addresses": []})
        self._stub(
            "ec2",
            "describe_nat_gateways",
            {"NatGateways": [{"NatGatewayId": "nat-1", "State": nat}]},
        )

    def has_volume(self, made_at: int = 7) -> None:
        needed = {
            "OwnerId": "1",
            "CreationToken": "x",
            "CreationTime": made_at,
            "PerformanceMode": "generalPurpose",
        }
        volume = {
            "FileSystemId": "fs-1",
            "LifeCycleState": "available",
            "SizeInBytes": {"Value": 6144},
            **needed,
        }
        tags = [{"Key": stack.TAG, "Value": "t"}]
        tagged_volume = {**volume, "NumberOfMountTargets": 0, "Tags": tags}
        self._stub("efs", "describe_file_systems", {"FileSystems": [tagged_volume]})


@pytest.fixture(name="cloud")
def make_cloud(account: Account, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    return Cloud(account, stub, monkeypatch)


CHECKED = ["describe_instances", "describe_volumes", "describe_addresses", "describe_nat_gateways"]


def test_a_dependency_violation_is_tried_again_and_then_nothing_is_left(cloud: Cloud) -> None:
    cloud.begins_in()
    cloud.is_in("DELETE_IN_PROGRESS", "DELETE_FAILED")
    cloud.is_deleted()
    cloud.is_in("DELETE_IN_PROGRESS", "DELETE_COMPLETE")
    cloud.has_volume()
    cloud.has_left()
    cloud.has_volume()
    steps: list[str] = []
    (volume,) = take_down(cloud.account, SETTINGS, steps.append, delete_data=False)
    assert volume["FileSystemId"] == "fs-1"
    once = [
        "delete_stack",
        "describe_stacks",
        "describe_stack_events",
        "describe_stacks",
    ]
    volumes = "describe_file_systems"
    assert cloud.calls == [
        "describe_stacks",
        *once,
        *once,
        volumes,
        *CHECKED,
        volumes,
    ]
    assert steps == ["Group: DELETE_IN_PROGRESS"] * 2


def test_what_cannot_be_deleted_is_named(cloud: Cloud) -> None:
    """The second attempt is the last."""
    cloud.begins_in()
    cloud.is_in("DELETE_FAILED")
    cloud.is_deleted()
    cloud.is_in("DELETE_FAILED")
    cloud.cannot_delete()
    with pytest.raises(AwsError) as error:
        take_down(cloud.account, SETTINGS, lambda text: None, delete_data=False)
    assert error.value.what.startswith(
        "AWS could not delete:\n  - Group (sg-1): resource sg-1 has a dependent object"
    )
    assert "nat-1" not in error.value.what
    assert (error.value.next_step or "").startswith(
        "remove what of yours uses it, such as an interface in its"
    )


def test_a_disk_that_ends_a_moment_after_its_instance_is_waited_for(cloud: Cloud) -> None:
    cloud.begins_in()
    cloud.is_in("DELETE_COMPLETE")
    cloud.has_volume()
    cloud.has_left(node="shutting-down", disks=["vol-1"], nat="deleting")
    cloud.has_volume()
    cloud.has_left()
    cloud.has_volume()
    steps: list[str] = []
    assert len(take_down(cloud.account, SETTINGS, steps.append, delete_data=False)) == 1
    assert steps == ["waiting for disk vol-1"]


def test_what_stays_on_the_bill_is_an_error(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "_LAST_CHECKS", 2)
    cloud.begins_in()
    cloud.is_in("DELETE_COMPLETE")
    cloud.has_volume()
    for _ in range(2):
        cloud.has_left(node="running", nat="available")
        cloud.has_volume()
    with pytest.raises(AwsError) as error:
        take_down(cloud.account, SETTINGS, lambda text: None, delete_data=False)
    assert error.value.what == "still on the bill of t: instance i-1, NAT gateway nat-1"
    assert (
        error.value.next_step
        == "run down again in a minute; if they stay, delete them in the EC2 console"
    )


@pytest.mark.parametrize(("made_at", "is_kept"), [(7, False), (3, True)])
def test_up_was_killed_while_the_stack_was_made(
    cloud: Cloud, stub: Stub, made_at: int, is_kept: bool
) -> None:
    """A volume that was made for it has no data; an older one is that of an earlier cluster of the
    name."""
    cloud.begins_in("CREATE_IN_PROGRESS")
    cloud.is_in("DELETE_IN_PROGRESS", "DELETE_COMPLETE")
    cloud.has_volume(made_at)
    target = {
        "MountTargetId": "fsmt-12345678",
        "FileSystemId": "fs-1",
        "SubnetId": "subnet-12345678",
        "LifeCycleState": "available",
    }
    if not is_kept:
        stub("efs", "describe_mount_targets", {"MountTargets": [target]}, FileSystemId="fs-1")
        stub("efs", "delete_mount_target", {}, MountTargetId="fsmt-12345678")
        stub("efs", "describe_mount_targets", {"MountTargets": []}, FileSystemId="fs-1")
        stub("efs", "delete_file_system", {}, FileSystemId="fs-1")
    cloud.has_left()
    if is_kept:
        cloud.has_volume(made_at)
    else:
        stub("efs", "describe_file_systems", {"FileSystems": []})
    volumes = take_down(cloud.account, SETTINGS, lambda text: None, delete_data=False)
    names = [volume["FileSystemId"] for volume in volumes]
    assert names == (["fs-1"] if is_kept else [])
