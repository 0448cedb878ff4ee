"""Clusters from nothing to nothing on a moto server (what moto has not: conftest.py)."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="pip install 'drumline[dev]' brings it")

from drumline.base.errors import UsageError
from drumline.cli import aws_command
from drumline.launch.aws import cluster_creation, cluster_settings
from drumline.launch.aws.account import Account, AwsError
from drumline.launch.aws.cluster_creation import (
    NO_CAPACITY,
    NoCapacityError,
    bring_up,
    template_text,
)
from drumline.launch.aws.cluster_plan import (
    ClusterPlan,
    make_plan,
)
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.instance_type import Hardware, zones_that_offer
from drumline.launch.aws.prices import UNKNOWN, Cost
from drumline.launch.aws.stack import find_stack, nodes_of, parameters_of
from drumline.launch.aws.teardown import take_down
from tests.store_server import Proxy
from tests.unit.launch.aws.conftest import SECRET, add_programs

# moto warns of what it leaves out; conftest.py names it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Tried to parse", "ignore:.*utcnow", "ignore::ResourceWarning"
)
Stub = Callable[..., None]


def image(account: Account) -> str:
    answer = account.call(
        "ec2", "register_image", Name="mine", Architecture="x86_64", RootDeviceName="/dev/sda1"
    )
    return str(answer["ImageId"])


def subnet(account: Account) -> str:
    """Of the default VPC: moto cannot delete the route table of a new one."""
    zone = zones_that_offer(account, "g4dn.xlarge", None)[0]
    subnets = account.all("ec2", "describe_subnets", "Subnets")
    return next(str(subnet["SubnetId"]) for subnet in subnets if subnet["AvailabilityZone"] == zone)


def settings(account: Account, **changes: Any) -> ClusterSettings:
    fields = {
        "name": "t",
        "type": "g4dn.xlarge",
        "ami": image(account),
        "key": "laptop",
        "region": account.region,
    }
    fields["ssh_from"] = "192.0.2.7/32"
    return ClusterSettings(**{**fields, "subnet": subnet(account), **changes})


def inventory(account: Account) -> Iterator[str]:
    """Everything that a cluster could leave behind, on the bill or not. Without disks: moto keeps
    those of ended instances, whatever the launch template says."""
    for reservation in account.all("ec2", "describe_instances", "Reservations"):
        yield from (
            instance["InstanceId"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] != "terminated"
        )
    yield from (
        volume["FileSystemId"]
        for volume in account.all("efs", "describe_file_systems", "FileSystems")
    )
    yield from (
        vpc["VpcId"] for vpc in account.all("ec2", "describe_vpcs", "Vpcs") if not vpc["IsDefault"]
    )
    groups = account.all("ec2", "describe_security_groups", "SecurityGroups")
    yield from (group["GroupId"] for group in groups if group["GroupName"] != "default")
    yield from (role["RoleName"] for role in account.all("iam", "list_roles", "Roles"))
    templates = account.all("ec2", "describe_launch_templates", "LaunchTemplates")
    yield from (template["LaunchTemplateId"] for template in templates)
    scaling_groups = account.all("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups")
    yield from (scaling_group["AutoScalingGroupName"] for scaling_group in scaling_groups)
    yield from (
        address["AllocationId"]
        for address in account.call("ec2", "describe_addresses")["Addresses"]
    )
    yield from (gateway["NatGatewayId"] for gateway in gateways(account))
    yield from (
        stack["StackName"] for stack in account.all("cloudformation", "describe_stacks", "Stacks")
    )


def gateways(account: Account) -> list[Any]:
    nat_gateways = account.all("ec2", "describe_nat_gateways", "NatGateways")
    return [gateway for gateway in nat_gateways if gateway["State"] != "deleted"]


def quiet(_: str) -> None:
    pass


class Shell:
    """`drumline aws` with the account of the test."""

    def __init__(self, account: Account, capsys: pytest.CaptureFixture[str]) -> None:
        self.account = account
        self._capsys = capsys
        self._made = [
            "--type",
            "g4dn.xlarge",
            "--ami",
            image(account),
            "--key",
            "laptop",
            "--subnet",
            subnet(account),
        ]
        self._made += ["--ssh-from", "192.0.2.7/32"]

    def __call__(self, verb: str, *flags: str) -> list[str]:
        self._capsys.readouterr()
        made = self._made if verb in ("plan", "up") else []
        assert (
            aws_command.run([verb, "--region", self.account.region, "--name", "t", *made, *flags])
            == 0
        )
        out, err = self._capsys.readouterr()
        assert SECRET not in out + err
        return out.splitlines()


def test_a_cluster_from_nothing_to_nothing(
    cloud: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_settings, "connect", lambda region, profile: cloud)
    drumline = Shell(cloud, capsys)

    planned = drumline("plan")
    table = [line.rsplit(maxsplit=2) for line in planned]
    assert ["2 x g4dn.xlarge (on-demand)", "$4.00", "$96.00"] in table
    quota = "quota 'Running On-Demand G and VT instances': 96 vCPUs, 8 needed"
    assert f"check   {quota}" in planned
    assert (
        f"check   launch copies this installation to the nodes: drumline {version('drumline')}"
        in planned
    )
    # Two instances, 300 GiB and two addresses.
    assert ["together, beside EFS and traffic", "$8.30", "$199.20"] in table
    assert list(inventory(cloud)) == [], "plan touched something"

    assert drumline("up", "--tag", "team=vision", "--tag", "note=")[-3].startswith(
        "t is up: 2 nodes at 172."
    )
    nodes = nodes_of(cloud, "t")
    assert len(nodes) == 2
    first = find_stack(cloud, "drumline-t")
    assert first is not None
    template = cloud.call("cloudformation", "get_template", StackName="drumline-t")["TemplateBody"]
    assert SECRET not in f"{first} {template}", "nodes have a role, and no keys"
    volume = next(
        described["FileSystemId"]
        for described in cloud.all("efs", "describe_file_systems", "FileSystems")
    )
    assert [
        described["Encrypted"]
        for described in cloud.all("efs", "describe_file_systems", "FileSystems")
    ] == [True]
    disks = cloud.all("ec2", "describe_volumes", "Volumes")
    assert [disk["Size"] for disk in disks if disk["Encrypted"]] == [150, 150], (
        "moto has a second disk for each node"
    )

    made = set(inventory(cloud))
    drumline("up", "--tag", "note=")
    assert set(inventory(cloud)) == made, "a second up made something"
    with pytest.raises(UsageError, match="exists with other settings:\n  - NodeCount: 2 -> 3"):
        drumline("up", "--nodes", "3")
    with pytest.raises(UsageError, match="with other settings:\n  - tag team: vision -> audio"):
        drumline("up", "--tag", "team=audio")

    line, _, *addresses, count = drumline("status")
    assert line.startswith("t: CREATE_COMPLETE, 2 of 2 x g4dn.xlarge (on-demand) run in us-east-1")
    assert "so far at most $0.0" in line
    assert [address.split()[0] for address in addresses] == [node.address for node in nodes]
    assert count == "1 cluster in us-east-1"

    kept_line = f"kept the volume {volume}"
    for _ in range(2):
        assert drumline("down")[0].startswith(kept_line)
        assert set(inventory(cloud)) == {volume}
    assert drumline("status")[0].startswith(f"t: only its volume {volume} is left")

    drumline("up")
    again = find_stack(cloud, "drumline-t")
    assert again is not None
    assert (parameters_of(again)["VolumeId"], again["StackId"] != first["StackId"]) == (
        volume,
        True,
    )
    drumline("down")
    assert set(inventory(cloud)) == {volume}, "down deleted a volume that was there before"
    assert "nothing else of t is on the bill" in drumline("down", "--delete-data")[-1]
    assert list(inventory(cloud)) == []


class Killed(BaseException):
    """What a SIGKILL does to `up`, at one of its calls."""


def test_up_killed_at_every_call_leaves_nothing_after_down(
    cloud: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(cloud, settings(cloud))
    whole = cloud.call
    stages = [0]

    def kill_at(stage: int, *, is_before: bool) -> None:
        def call(service: str, operation: str, **arguments: Any) -> Any:
            stages[0] += 1
            if is_before and stages[0] == stage:
                raise Killed
            try:
                return whole(service, operation, **arguments)
            finally:
                if not is_before and stages[0] == stage:
                    raise Killed

        stages[0] = 0
        monkeypatch.setattr(cloud, "call", call)

    kill_at(0, is_before=True)
    bring_up(cloud, plan, quiet)
    last = stages[0]
    assert last >= 3, "find, create, follow"
    take_down(cloud, plan.settings, quiet, delete_data=True)
    for stage in range(1, last + 1):
        for is_before in (True, False):
            kill_at(stage, is_before=is_before)
            with pytest.raises(Killed):
                bring_up(cloud, plan, quiet)
            monkeypatch.setattr(cloud, "call", whole)
            assert take_down(cloud, plan.settings, quiet, delete_data=True) == []
            assert list(inventory(cloud)) == [], (
                f"killed {'before' if is_before else 'after'} call {stage}"
            )


def test_a_stack_that_fails_half_way_leaves_nothing_after_down(cloud: Account) -> None:
    plan = make_plan(cloud, settings(cloud))
    wrong = dataclasses.replace(plan, parameters={**plan.parameters, "SubnetId": "subnet-00000000"})
    with contextlib.suppress(Exception):  # moto's answer is not one of AWS
        bring_up(cloud, wrong, quiet)
    assert find_stack(cloud, "drumline-t") is not None
    assert list(inventory(cloud)), "moto has created the first half"
    assert take_down(cloud, plan.settings, quiet, delete_data=False) == [], (
        "an empty volume was kept"
    )
    assert list(inventory(cloud)) == []


def test_an_up_that_was_paused_leaves_a_newer_cluster_alone(
    cloud: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(cloud, settings(cloud))
    whole = cloud.call

    def call(service: str, operation: str, **arguments: Any) -> Any:
        answer = whole(service, operation, **arguments)
        if operation == "create_stack":
            monkeypatch.setattr(cloud, "call", whole)
            take_down(cloud, plan.settings, quiet, delete_data=True)
            bring_up(cloud, plan, quiet)
        return answer

    monkeypatch.setattr(cloud, "call", call)
    with pytest.raises(AwsError) as error:
        bring_up(cloud, plan, quiet)
    assert error.value.what == (
        "the cluster could not be created, for an unknown reason; another cluster t exists now and is "
        "left alone"
    )
    assert error.value.next_step == "drumline aws status --name t shows it"
    assert len(nodes_of(cloud, "t")) == 2


class Unfinished:
    """moto's stacks are complete at once: with this they are being created, until they are
    deleted."""

    def __init__(self, account: Account, status: str = "CREATE_IN_PROGRESS") -> None:
        self._whole = account.call
        self._status = status

    def __call__(self, service: str, operation: str, **arguments: Any) -> Any:
        answer = self._whole(service, operation, **arguments)
        if operation == "describe_stacks":
            for stack in answer["Stacks"]:
                if stack["StackStatus"] == "CREATE_COMPLETE":
                    stack["StackStatus"] = self._status
        return answer


def test_no_capacity_ends_the_creation_and_leaves_nothing(
    cloud: Account, session: Any, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(cloud, settings(cloud))
    reason = (
        "We currently do not have sufficient g4dn.xlarge capacity in the Availability Zone you requested (us-east-1a). "
        "Launching EC2 instance failed."
    )
    activity = {"ActivityId": "1", "AutoScalingGroupName": "drumline-t", "Cause": "c"}
    failed = {
        **activity,
        "StatusCode": "Failed",
        "StatusMessage": reason,
        "Description": "Launching a new EC2 instance",
    }
    now = datetime.now(UTC) + timedelta(minutes=1)
    earlier = {
        **failed,
        "StartTime": now - timedelta(days=1),
        "StatusMessage": "of an earlier cluster of this name",
    }
    stub("autoscaling", "describe_scaling_activities", {"Activities": [earlier]})
    stub(
        "autoscaling",
        "describe_scaling_activities",
        {"Activities": [{**failed, "StartTime": now}, earlier]},
    )
    monkeypatch.setattr(cloud, "call", Unfinished(cloud))
    with pytest.raises(NoCapacityError) as error:
        bring_up(cloud, plan, quiet)
    assert (
        error.value.what
        == f"AWS could not start the instances: {reason}; all that was made is removed again"
    )
    assert list(inventory(Account(session, cloud.region))) == []


@pytest.mark.parametrize(
    ("refusal", "is_full"),
    [
        ("There is no Spot capacity available that matches your request.", True),
        ("We currently do not have sufficient p5.48xlarge capacity in zones", True),
        ("InsufficientInstanceCapacity - ...", True),
        ("You have requested more vCPU capacity than your current vCPU limit of 0 allows", False),
        ("Your Spot request price of 0.1 is lower than the minimum required", False),
    ],
)
def test_another_zone_helps_only_where_one_is_full(refusal: str, is_full: bool) -> None:
    assert bool(NO_CAPACITY.search(refusal)) == is_full


def test_the_next_zone_is_tried_when_one_has_no_capacity(
    cloud: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without stacks: moto cannot delete one with a route table."""
    tried: list[str] = []
    full = 2

    def bring_up_in_last(account: Account, plan: ClusterPlan, progress: object) -> None:
        tried.append(plan.parameters["Zone"])
        if len(tried) <= full:
            raise NoCapacityError("no capacity; all that was made is removed again", next_step="x")

    monkeypatch.setattr(aws_command, "bring_up", bring_up_in_last)
    anywhere = settings(cloud, subnet=None)
    zones = zones_that_offer(cloud, "g4dn.xlarge", None)
    aws_command._up(cloud, anywhere)
    out, err = capsys.readouterr()
    assert tried == zones[:3]
    assert f"else in {zones[2]}, if there is no capacity before: $2.00 for an instance" in out
    assert f"no capacity; all that was made is removed again\n  next zone: {zones[1]}" in err

    tried.clear()
    with pytest.raises(NoCapacityError):
        aws_command._up(cloud, settings(cloud, subnet=None, zone=zones[0]))
    assert tried == zones[:1], "a zone was named"
    tried.clear()
    full = len(zones)
    with pytest.raises(NoCapacityError):
        aws_command._up(cloud, anywhere)
    assert tried == zones


def stub_failed_nodes(stub: Stub, *nodes: str) -> None:
    """Of a stack from time 5, in whose account an older cluster of this name had one too."""
    launched = {"older": 3}
    instances = [{"InstanceId": node, "LaunchTime": launched.get(node, 7)} for node in nodes]
    filters = [
        {"Name": "tag:drumline:cluster", "Values": ["t"]},
        {"Name": "state-reason-code", "Values": ["Client.InstanceInitiatedShutdown"]},
    ]
    answer = {"Reservations": [{"Instances": instances}]}
    stub("ec2", "describe_instances", answer, Filters=filters)


@pytest.fixture(name="creating")
def make_creating(
    account: Account, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """The next poll finds the stack like this. By Stubber: moto's nodes run nothing."""
    monkeypatch.setattr("drumline.launch.aws.stack.POLL_S", 0.0)
    stub("cloudformation", "describe_stacks", "ValidationError")
    stub("cloudformation", "create_stack", {"StackId": "arn:1"})

    def creating(status: str) -> None:
        stack = {"StackName": "drumline-t", "CreationTime": 5, "StackStatus": status}
        stub("cloudformation", "describe_stacks", {"Stacks": [stack]})

    return creating


CONSOLE = (
    "[  1.0] Linux\ndrumline: i-1: pip cannot install torch==9\r\n[ 99.0] reboot: Power down\n"
)


def test_a_node_that_fails_alone_is_replaced_and_the_stack_stays(
    account: Account, stub: Stub, plan: ClusterPlan, creating: Callable[[str], None]
) -> None:
    for poll in range(2):
        creating("CREATE_IN_PROGRESS")
        stub_failed_nodes(stub, "older", "i-1")
        if poll == 0:
            answer = {"Output": base64_of(CONSOLE)}
            stub("ec2", "get_console_output", answer, InstanceId="i-1")
        stub("autoscaling", "describe_scaling_activities", {"Activities": []})
        stub("cloudformation", "describe_stack_events", {"StackEvents": []})
    creating("CREATE_COMPLETE")
    steps: list[str] = []
    bring_up(account, plan, steps.append)
    assert steps.count("i-1: pip cannot install torch==9; AWS replaces it") == 1


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (CONSOLE, "i-1: pip cannot install torch==9"),
        ("", "i-1: its console output has no reason (yet)"),
        (
            None,
            "i-1: its console output is unknown: this user or role may not call ec2:GetConsoleOutput",
        ),
    ],
)
def test_as_many_failed_nodes_as_the_cluster_has_end_the_creation(
    account: Account,
    stub: Stub,
    plan: ClusterPlan,
    creating: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    output: str | None,
    reason: str,
) -> None:
    removed: list[str] = []

    def take_down_all(*_: object, **__: object) -> list[object]:
        removed.append("all")
        return []

    monkeypatch.setattr(cluster_creation, "take_down", take_down_all)
    creating("CREATE_IN_PROGRESS")
    stub_failed_nodes(stub, "i-0", "i-1")
    for _ in range(3):
        answer = "UnauthorizedOperation" if output is None else {"Output": base64_of(output)}
        stub("ec2", "get_console_output", answer)
    stub("cloudformation", "describe_stacks", "ValidationError")
    with pytest.raises(AwsError) as error:
        bring_up(account, plan, quiet)
    assert error.value.what == (
        f"2 nodes could not be prepared, the last one: {reason}; all that was made is removed again"
    )
    assert error.value.next_step == "correct this, and run the same command again"
    assert removed == ["all"]


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


REASON = "the cluster could not be created, at Vpc (AWS::EC2::Vpc): The maximum number of VPCs has been reached."


@pytest.mark.parametrize("nat_gateway", ["deleted", "available"])
def test_a_failed_resource_is_named_after_the_rollback(
    account: Account,
    stub: Stub,
    plan: ClusterPlan,
    monkeypatch: pytest.MonkeyPatch,
    nat_gateway: str,
) -> None:
    """By Stubber: moto's stacks do not fail. That all is removed is said only where AWS has nothing
    left."""
    monkeypatch.setattr("drumline.launch.aws.teardown._LAST_CHECKS", 1)

    def event(resource: str, status: str, reason: str | None = None) -> dict[str, Any]:
        kind = f"AWS::EC2::{resource}"
        event = {"LogicalResourceId": resource, "ResourceType": kind, "ResourceStatus": status}
        return {"StackId": "s", "EventId": "e", "StackName": "n", "Timestamp": 0, **event} | (
            {"ResourceStatusReason": reason} if reason else {}
        )

    stack = {"StackName": "drumline-t", "CreationTime": 0}
    stub("cloudformation", "describe_stacks", "ValidationError")
    stub("cloudformation", "create_stack", {"StackId": "arn:1"})
    for status, expected_message in [
        ("CREATE_IN_PROGRESS", event("Vpc", "CREATE_IN_PROGRESS")),
        ("CREATE_IN_PROGRESS", event("Vpc", "CREATE_IN_PROGRESS")),
    ]:
        stub(
            "cloudformation",
            "describe_stacks",
            {"Stacks": [{**stack, "StackStatus": status}]},
            StackName="arn:1",
        )
        if status == "CREATE_IN_PROGRESS":
            stub("ec2", "describe_instances", {"Reservations": []})
            stub("autoscaling", "describe_scaling_activities", "ValidationError")
        if expected_message:
            stub(
                "cloudformation",
                "describe_stack_events",
                {"StackEvents": [expected_message]},
                StackName="arn:1",
            )
    events = [
        event("Subnet", "CREATE_FAILED", "Resource creation cancelled"),
        event("Vpc", "CREATE_FAILED", "The maximum number of VPCs has been reached."),
        event("Vpc", "CREATE_IN_PROGRESS"),
    ]
    rolling_back = {**stack, "StackStatus": "DELETE_IN_PROGRESS"}
    stub("cloudformation", "describe_stacks", {"Stacks": [rolling_back]}, StackName="arn:1")
    stub("cloudformation", "describe_stack_events", {"StackEvents": events}, StackName="arn:1")
    ours = {"StackId": "arn:1", "Tags": [{"Key": "drumline:cluster", "Value": "t"}]}
    for name in ("drumline-t", "arn:1"):
        answer = {"Stacks": [{**rolling_back, **ours}]}
        stub("cloudformation", "describe_stacks", answer, StackName=name)
    stub("cloudformation", "delete_stack", {}, StackName="arn:1")
    stub("cloudformation", "describe_stacks", {"Stacks": [rolling_back]}, StackName="arn:1")
    deleting = {"StackEvents": [event("Group", "DELETE_IN_PROGRESS")]}
    stub("cloudformation", "describe_stack_events", deleting, StackName="arn:1")
    stub(
        "cloudformation",
        "describe_stacks",
        {"Stacks": [{**stack, "StackStatus": "DELETE_COMPLETE"}]},
    )
    stub("efs", "describe_file_systems", {"FileSystems": []})
    stub("ec2", "describe_instances", {"Reservations": []})
    stub("ec2", "describe_volumes", {"Volumes": []})
    stub("ec2", "describe_addresses", {"Addresses": []})
    gateway = {"NatGatewayId": "nat-1", "State": nat_gateway}
    stub("ec2", "describe_nat_gateways", {"NatGateways": [gateway]})
    stub("efs", "describe_file_systems", {"FileSystems": []})
    monkeypatch.setattr("drumline.launch.aws.stack.POLL_S", 0.0)
    steps: list[str] = []
    with pytest.raises(AwsError) as error:
        bring_up(account, plan, steps.append)
    assert steps[:2] == ["Vpc: CREATE_IN_PROGRESS", "Group: DELETE_IN_PROGRESS"]
    if nat_gateway == "deleted":
        assert error.value.what == f"{REASON}; all that was made is removed again"
    else:
        assert error.value.what == (
            f"{REASON}; not all that was made is removed: still on the bill of t: NAT gateway nat-1"
        )
        assert (
            error.value.next_step
            == "drumline aws down --name t removes it, or names what AWS cannot delete"
        )


@pytest.fixture(name="plan")
def make_a_plan() -> ClusterPlan:
    hardware = Hardware(
        arch="x86_64",
        num_vcpus=4,
        num_gpus=1,
        gpu="T4",
        num_efas=0,
        num_cards=1,
    )
    settings = ClusterSettings(name="t", type="g4dn.xlarge")
    return ClusterPlan(
        settings=settings,
        hardware=hardware,
        parameters={"Owner": ""},
        costs=(Cost("x", 1.0, UNKNOWN),),
        volume_price=UNKNOWN,
        notes=(),
        unknowns=(),
        other_zones={},
    )


def test_a_node_that_ended_is_started_again_and_a_lost_one_is_replaced(
    cloud: Account, tmp_path: Path
) -> None:
    plan = make_plan(cloud, settings(cloud))
    bring_up(cloud, plan, quiet)
    first, second = nodes_of(cloud, "t")
    cloud.call(
        "autoscaling",
        "terminate_instance_in_auto_scaling_group",
        InstanceId=second.id,
        ShouldDecrementDesiredCapacity=True,
    )
    assert [node.id for node in nodes_of(cloud, "t")] == [first.id]
    bring_up(cloud, plan, quiet)
    after = {node.id for node in nodes_of(cloud, "t")}
    assert len(after) == 2
    assert first.id in after
    assert second.id not in after
    cloud.call("ec2", "terminate_instances", InstanceIds=[*(after - {first.id})])
    replaced = {node.id for node in nodes_of(cloud, "t")}
    assert len(replaced) == 2, "the group starts another"
    assert replaced & after == {first.id}
    cloud.call(
        "autoscaling",
        "update_auto_scaling_group",
        AutoScalingGroupName="drumline-t",
        MinSize=0,
        MaxSize=0,
        DesiredCapacity=0,
    )
    with pytest.raises(UsageError, match="the time of the cluster t is over"):
        bring_up(cloud, plan, quiet)


def test_many_network_cards_get_a_nat_gateway_and_no_public_address(
    cloud: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_programs(tmp_path / "bin", monkeypatch, "aws", "session-manager-plugin")
    plan = make_plan(
        cloud, settings(cloud, type="p4d.24xlarge", nodes=1, ssm=True, ssh_from=None, subnet=None)
    )
    parameters = plan.parameters
    assert (parameters["PublicAddress"], parameters["Efa"]) == ("false", "false")
    assert "NAT gateway until `down`" in plan.costs[-1].what
    assert (
        template_text(plan.hardware, {}).count('"InterfaceType": "efa-only"')
        == plan.hardware.num_efas
        == 4
    )
    bring_up(cloud, plan, quiet)
    assert len(gateways(cloud)) == 1
    assert [node.public_address for node in nodes_of(cloud, "t")] == [None]


def test_a_busy_endpoint_is_asked_again(
    aws_server: str, account: Account, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real connection to a server that answers 503 first, and then to one that does so for
    ever."""
    refusals = [503]
    with Proxy(aws_server, lambda method, path: refusals.pop() if refusals else None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        subnets = Account(session, account.region).all("ec2", "describe_subnets", "Subnets")
        assert (len(proxy.requests), bool(subnets)) == (2, True)
        monkeypatch.setattr("drumline.launch.aws.account._MAX_ATTEMPTS", 2)
        proxy.requests.clear()
        proxy.fault = lambda method, path: 503
        with pytest.raises(
            AwsError, match=r"AWS refused ec2:DescribeSubnets: Service Unavailable \(503\)"
        ):
            Account(session, account.region).call("ec2", "describe_subnets")
        assert len(proxy.requests) == 2
