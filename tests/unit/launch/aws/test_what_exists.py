"""What `plan` reads of an account before anything is made: a reservation, a bucket, the image, the
endpoints of a VPC. Answers as AWS documents them, by Stubber: moto has no reservations."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from drumline.base.errors import UsageError
from drumline.launch.aws import cluster_plan
from drumline.launch.aws.account import Account
from drumline.launch.aws.cluster_access import s3_notes
from drumline.launch.aws.cluster_plan import check_bucket, find_reservation
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.instance_type import Hardware, check_disk
from drumline.launch.aws.prices import UNKNOWN
from tests.unit.launch.aws.test_cluster_plan import resources
from tests.unit.launch.aws.test_refusals import message

Stub = Callable[..., None]
RESERVED = ClusterSettings(type="p5.48xlarge", nodes=2, reservation="cr-1")
RESERVATION = {
    "CapacityReservationId": "cr-1",
    "InstanceType": "p5.48xlarge",
    "AvailabilityZone": "us-east-1b",
    "State": "active",
    "AvailableInstanceCount": 2,
    "TotalInstanceCount": 4,
}


def reserve(stub: Stub, **changes: Any) -> None:
    answer = {"CapacityReservations": [RESERVATION | changes]}
    stub("ec2", "describe_capacity_reservations", answer, CapacityReservationIds=["cr-1"])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"InstanceType": "p4d.24xlarge"}, "is for p4d.24xlarge, not for p5.48xlarge"),
        ({"AvailableInstanceCount": 1}, "has 1 free instance, and --nodes is 2"),
        ({"State": "expired"}, "is expired"),
        (
            {"State": "scheduled", "StartDate": datetime(2026, 12, 1, 11, 30, tzinfo=UTC)},
            "is scheduled, from 2026-12-01 11:30 UTC",
        ),
    ],
)
def test_a_reservation_that_the_nodes_cannot_use_is_refused(
    account: Account, stub: Stub, changes: dict[str, Any], what: str
) -> None:
    reserve(stub, **changes)
    with pytest.raises(UsageError) as error:
        find_reservation(account, RESERVED, is_up=False)
    assert message(error) == (
        f"--reservation: cr-1 {what}",
        "give another one, or correct --type and --nodes; one that is scheduled has to begin first",
    )


def test_a_reservation_names_the_zone_and_its_end(account: Account, stub: Stub) -> None:
    ends = datetime(2026, 12, 2, 11, 30, tzinfo=UTC)
    reserve(stub, EndDate=ends)
    reservation = find_reservation(account, RESERVED, is_up=False)
    (note, _) = cluster_plan._notes(account, RESERVED, {}, reservation)
    assert note == (
        "cr-1 has 2 of 4 instances free, until 2026-12-02 11:30 UTC; AWS may end its instances before"
    )
    assert cluster_plan._named_zone(RESERVED, {}, reservation) == "us-east-1b"
    with pytest.raises(UsageError) as error:
        cluster_plan._named_zone(RESERVED, {"AvailabilityZone": "us-east-1a"}, reservation)
    assert message(error) == (
        "--subnet, --reservation and --zone are in several zones: us-east-1a and us-east-1b",
        "give a --subnet in the zone of the reservation, and no --zone",
    )
    reserve(stub, AvailableInstanceCount=0)
    assert find_reservation(account, RESERVED, is_up=True), "its own nodes use it"


@pytest.mark.parametrize(
    ("market", "expected"),
    [("on-demand", None), ("capacity-block", {"MarketType": "capacity-block"})],
)
def test_the_nodes_start_in_the_reservation_and_nowhere_else(
    account: Account, stub: Stub, market: str, expected: dict[str, str] | None
) -> None:
    stub("efs", "describe_file_systems", {"FileSystems": []})
    hardware = Hardware(
        arch="x86_64",
        num_vcpus=1,
        num_gpus=8,
        gpu="H100",
        num_efas=0,
        num_cards=1,
    )
    parameters = cluster_plan._parameters(account, RESERVED, hardware, {}, is_public=True) | {
        "Market": market
    }
    data = resources(parameters)["LaunchTemplate"]["LaunchTemplateData"]
    target = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    assert data["CapacityReservationSpecification"] == target
    assert data.get("InstanceMarketOptions") == expected


def test_a_bucket_is_asked_for_and_is_the_only_one_of_the_role(
    account: Account, stub: Stub
) -> None:
    stub("s3", "head_bucket", {})
    check_bucket(account, "my-data")
    stub("s3", "head_bucket", "404")
    with pytest.raises(UsageError) as error:
        check_bucket(account, "my-dta")
    assert message(error) == (
        "--bucket: there is no bucket 'my-dta'",
        "correct it, or make it: aws s3 mb s3://my-dta",
    )
    stub("s3", "head_bucket", "403")
    check_bucket(account, "my-data")
    (warning,) = account.warnings
    assert warning.startswith("whether s3://my-data can be used: AWS refused s3:HeadBucket")
    parameters = dict.fromkeys(
        ("VpcId", "VolumeId", "MountTargetAddress", "SshFrom", "KeyName"), ""
    )
    rights = resources({**parameters, "Bucket": "my-data"})["BucketRights"]
    listing, objects = rights["PolicyDocument"]["Statement"]
    assert listing["Resource"] == {"Fn::Sub": "arn:${AWS::Partition}:s3:::${Bucket}"}
    assert objects["Resource"] == {"Fn::Sub": "arn:${AWS::Partition}:s3:::${Bucket}/*"}


def test_a_disk_smaller_than_the_image_is_refused() -> None:
    disks = [
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
        {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 200}},
    ]
    image = {
        "ImageId": "ami-1",
        "RootDeviceName": "/dev/xvda",
        "BlockDeviceMappings": disks,
    }
    with pytest.raises(UsageError) as error:
        check_disk(ClusterSettings(), image)
    assert message(error) == (
        "--disk: 150 GiB, and the image ami-1 has 200",
        "give --disk 200 or more, or another --ami",
    )
    note = check_disk(ClusterSettings(disk=300), image)
    assert note == "the image needs 200 GiB of 300"
    assert check_disk(ClusterSettings(), {**image, "RootDeviceName": "/dev/sda"}) == "", "not known"


def test_how_an_existing_vpc_reaches_s3(account: Account, stub: Stub) -> None:
    for endpoints, note in [
        ([{"VpcEndpointId": "vpce-1"}], "vpc-1 has an endpoint for S3: vpce-1"),
        ([], "vpc-1 has no endpoint for S3: through a NAT gateway, each GB costs money"),
    ]:
        stub("ec2", "describe_vpc_endpoints", {"VpcEndpoints": endpoints})
        assert list(s3_notes(account, "vpc-1")) == [note]
    stub("ec2", "describe_vpc_endpoints", "UnauthorizedOperation")
    assert list(s3_notes(account, "vpc-1")) == []
    assert account.warnings == [
        "whether vpc-1 has an endpoint for S3: this user or role may not call ec2:DescribeVpcEndpoints"
    ]


def test_aws_keeps_the_limit_of_a_spot_price_that_is_unknown() -> None:
    settings = ClusterSettings(type="g6.12xlarge", spot=True, max_price=2.0)
    cluster_plan._check_ceiling(settings, UNKNOWN)
    assert cluster_plan._is_above_ceiling(settings, 2.5), "such a zone is not tried next"
