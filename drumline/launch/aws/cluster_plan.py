"""The whole change before it is made: every check, the price, and the parameters of the stack.
Nothing is touched.

First what AWS offers of an instance type in a region: its hardware, the zones that have it, the
quota, and an image.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from drumline.base.errors import UsageError
from drumline.base.text import columns, join_names, plural
from drumline.launch.aws import prices
from drumline.launch.aws.account import Account, AwsError, Described, filters
from drumline.launch.aws.cluster_settings import ME, ClusterSettings
from drumline.launch.aws.stack import (
    find_cluster,
    kept_volumes,
    made_at,
    owner_of,
    parameters_of,
)
from drumline.launch.templates import render

# The family of a quota by the first letters of a type, where it is not these letters.
_FAMILIES = {
    "gr": "g",
    "vt": "g",
    **dict.fromkeys(
        ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), "standard"
    ),
}
# Quotas of running vCPUs by family and market: docs.aws.amazon.com/ec2/latest/instancetypes
_QUOTAS: Mapping[tuple[str, str], str] = {
    ("standard", "on-demand"): "L-1216C47A",
    ("standard", "spot"): "L-34B43A08",
    ("g", "on-demand"): "L-DB2E81BA",
    ("g", "spot"): "L-3819A6DF",
    ("p", "on-demand"): "L-417A185B",
    ("p", "spot"): "L-7212CCBC",
    ("p5", "spot"): "L-C4BD4855",
}
_DLAMI = "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
TEMPLATE = Path(__file__).with_name("cluster.yaml")
# A line of it in whose place something else goes.
MARK = re.compile(r"^( *)# <(.+)>\n", re.MULTILINE)
# They become part of the user data, which cannot be longer than 16 kB.
NODE_PROGRAMS = (
    TEMPLATE.with_name("idle_shutdown.py"),
    TEMPLATE.with_name("prepare.sh"),
)
ADDRESS_URL = "https://checkip.amazonaws.com"
EVERYWHERE = "0.0.0.0/0"
# What ssh through Session Manager runs on this machine.
SESSION_PROGRAMS = ("aws", "session-manager-plugin")
SESSION_MANUAL = "docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
CAPACITY_BLOCK = "capacity-block"
# Chosen again at every start; a stack that differs in them alone is the same.
MOVING = ("EndsAt", "ImageId", "Owner", "SshFrom", "VolumeId")


# What AWS offers


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Of one instance type."""

    name: str
    arch: str
    num_vcpus: int
    num_gpus: int
    gpu: str
    num_efas: int
    """EFA interfaces at most; 0: it has none."""
    num_cards: int


def find_hardware(account: Account, name: str) -> Hardware:
    """As AWS describes the type in this region."""
    try:
        answer = account.call("ec2", "describe_instance_types", InstanceTypes=[name])
    except AwsError as refused:
        if refused.code not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        raise UsageError(
            f"--type: there is no instance type {name!r} in {account.region}",
            next_step="correct it, or give another --region; aws.amazon.com/ec2/instance-types has all types",
        ) from refused

    described = answer["InstanceTypes"][0]
    network = described["NetworkInfo"]
    num_efas = int(network.get("EfaSupported", False))
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    archs = described["ProcessorInfo"]["SupportedArchitectures"]
    return Hardware(
        name=name,
        arch="arm64" if "arm64" in archs else "x86_64",
        num_vcpus=described["VCpuInfo"]["DefaultVCpus"],
        num_gpus=sum(gpu["Count"] for gpu in gpus),
        gpu=gpus[0]["Name"] if gpus else "",
        num_efas=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", num_efas),
        num_cards=network.get("MaximumNetworkCards", 1),
    )


def check_quota(
    account: Account, hardware: Hardware, num_nodes: int, market: str
) -> str:
    """Raise if the nodes are more than the account may ever run; a sentence about the quota, empty
    if it may not be read. What else runs counts too, which AWS does at `up`."""
    code = _quota_code(hardware.name, market)
    if code is None:
        return f"quota of {hardware.name} ({market}): not known to drumline, so it was not checked"

    quota: Described = {}
    with account.optional(f"the quota of {hardware.name} ({market})"):
        request = {"ServiceCode": "ec2", "QuotaCode": code}
        quota = account.call("service-quotas", "get_service_quota", **request)["Quota"]
    if not quota:
        return ""

    needed = hardware.num_vcpus * num_nodes
    limit = int(quota["Value"])
    described = f"quota {quota['QuotaName']!r}: {limit} vCPUs"
    if needed > limit:
        raise AwsError(
            f"{plural(num_nodes, 'instance')} of {hardware.name} need {needed} vCPUs; {described}",
            next_step="ask for more, which may take days: https://console.aws.amazon.com/servicequotas/home/services/"
            f"ec2/quotas/{code}?region={account.region}; or give fewer --nodes or another --type",
            code="QuotaExceeded",
        )

    return f"{described}, {needed} needed"


def _quota_code(instance_type: str, market: str) -> str | None:
    """None: drumline does not know it."""
    letters, number = re.findall(r"([a-z]+)(\d*)", instance_type)[0]
    family = _FAMILIES.get(letters, letters)
    if family == "p" and market == "spot" and int(number) >= 5:
        family += number
    return _QUOTAS.get((family, market))


@dataclass(frozen=True, kw_only=True)
class Image:
    """What the nodes boot."""

    id: str
    root_device: str
    size: int
    """GiB that its disk has at least; 0: not known."""


def find_image(account: Account, ami: str | None, hardware: Hardware) -> Image:
    """The given image, or the newest default one."""
    if ami is None:
        name = _UBUNTU.format(arch=hardware.arch.replace("x86_64", "amd64"))
        if hardware.num_gpus:
            name = _DLAMI.format(arch=hardware.arch)
        ami = str(account.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"])

    image = account.call("ec2", "describe_images", ImageIds=[ami])["Images"][0]
    root_device = image.get("RootDeviceName") or "/dev/sda1"
    disks = {
        disk.get("DeviceName"): disk.get("Ebs", {})
        for disk in image.get("BlockDeviceMappings", ())
    }
    size = disks.get(root_device, {}).get("VolumeSize", 0)
    return Image(id=ami, root_device=root_device, size=size)


def zones_in_order(
    account: Account,
    instance_type: str,
    named_zone: str | None,
    spot_prices: Mapping[str, float],
) -> list[str]:
    """The named zone, if it offers the type; otherwise all that do, the cheapest first."""
    offered = account.all(
        "ec2",
        "describe_instance_type_offerings",
        "InstanceTypeOfferings[].Location",
        LocationType="availability-zone",
        Filters=filters({"instance-type": instance_type}),
    )
    zones = sorted(offered)
    if not zones:
        raise UsageError(
            f"{account.region} does not offer {instance_type}",
            next_step="give another --region or another --type",
        )

    if named_zone is None:
        # Local Zones, whose names are longer, are elsewhere, cost more, and have no EFS.
        ordinary_zones = [
            zone for zone in zones if len(zone) == len(account.region) + 1
        ]
        return sorted(
            ordinary_zones or zones,
            key=lambda zone: spot_prices.get(zone, float("inf")),
        )

    if named_zone not in zones:
        raise UsageError(
            f"{named_zone} does not offer {instance_type}; {join_names(zones)} do",
            next_step="give one of these as --zone (or a subnet in it), or another --type",
        )

    return [named_zone]


# The plan


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What `up` makes, and what it costs."""

    settings: ClusterSettings
    hardware: Hardware
    parameters: Mapping[str, str]
    costs: Sequence[prices.Cost]
    volume_price: float | None
    notes: Sequence[str]
    """What was checked."""
    unknowns: Sequence[str] = ()
    """What cannot be known, or may not be read."""
    other_zones: Mapping[str, float | None] = field(default_factory=dict)
    """Where it is tried next if the zone has no capacity, with the price of an instance."""

    def template(self) -> str:
        """Of the stack."""
        # For what the group starts: of the rest, AWS takes the user's tags from the stack.
        tags = [
            {"Key": key, "Value": value} for key, value in self.settings.tags.items()
        ]
        return template_text(
            cards=_cards(self.hardware) if self.has_cards else (),
            disk_tags=tags,
            instance_tags=[{**tag, "PropagateAtLaunch": True} for tag in tags],
        )

    @property
    def has_cards(self) -> bool:
        """Whether the instances get several network interfaces."""
        return not _has_one_card(self.settings, self.hardware)

    def lines(self) -> list[str]:
        """What the user confirms."""
        text = render(
            "aws/plan.txt.j2",
            plan=self,
            table=columns(list(self._rows()), right=(1, 2)),
            hour=prices.total(cost.an_hour for cost in self.costs),
            dollars=prices.dollars,
        )
        return text.splitlines()

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """What is made, with its price of an hour now, and until the end at most."""
        hours = self.settings.hours
        yield "what is made", "an hour", f"{hours:g} h at most"
        for cost in self.costs:
            yield cost.what, *_price_cells(cost.an_hour, cost.most_an_hour, hours)
        if not self.parameters["SubnetId"]:
            yield "VPC with a gateway endpoint for S3", "free", "free"
        yield (
            "security group, role, launch template, Auto Scaling group",
            "free",
            "free",
        )
        if not self.parameters["VolumeId"]:
            price = prices.dollars(self.volume_price)
            yield f"encrypted EFS volume, {price} for a GB a month", "by use", "by use"
        hour = prices.total(cost.an_hour for cost in self.costs)
        most = prices.total(cost.most_an_hour for cost in self.costs)
        yield "together, beside EFS and traffic", *_price_cells(hour, most, hours)


def _price_cells(
    hour: float | None, most: float | None, hours: float
) -> tuple[str, str]:
    return prices.dollars(hour), prices.dollars(prices.times(most, hours))


def template_text(
    cards: Iterable[Mapping[str, Any]] = (),
    disk_tags: Iterable[Mapping[str, Any]] = (),
    instance_tags: Iterable[Mapping[str, Any]] = (),
) -> str:
    """With the programs of the nodes in it, and what is added to lists of it."""
    parts = {path.name: path.read_text(encoding="utf-8") for path in NODE_PROGRAMS}
    lists = {"cards": cards, "disk_tags": disk_tags, "instance_tags": instance_tags}
    for name, entries in lists.items():  # YAML reads JSON
        parts[name] = "".join(f"- {json.dumps(entry)}\n" for entry in entries)

    text = TEMPLATE.read_text(encoding="utf-8")
    return MARK.sub(lambda mark: textwrap.indent(parts[mark[2]], mark[1]), text)


def make_plan(
    account: Account, settings: ClusterSettings, full_zones: Collection[str] = ()
) -> ClusterPlan:
    """Raises at the first check that fails. `full_zones`: where AWS had no capacity."""
    if not settings.type:
        raise UsageError(
            "no instance type is set",
            next_step="give --type, such as --type g6.12xlarge",
        )

    hardware = find_hardware(account, settings.type)
    if settings.efa and not hardware.num_efas:
        raise UsageError(
            f"{settings.type} has no EFA",
            next_step="leave --efa out, or give another --type",
        )

    stack = find_cluster(account, settings)
    subnet = _subnet(account, settings.subnet)
    is_public = _is_public(settings, hardware, subnet)
    check_way_in(settings, hardware, is_public=is_public)
    check_way_out(account, settings, subnet, is_public=is_public)
    reservation = find_reservation(account, settings, is_up=stack is not None)
    is_block = reservation.get("ReservationType") == CAPACITY_BLOCK

    named_zone = _named_zone(settings, subnet, reservation)
    if named_zone is None and stack is not None:
        named_zone = parameters_of(stack).get("Zone")
    zone_prices = _zone_prices(account, settings, named_zone, is_block=is_block)
    zone, *other_zones = [name for name in zone_prices if name not in full_zones]
    _check_ceiling(settings, zone_prices[zone])

    # The nodes of a cluster that is up are part of what is in use. A Capacity Block has no quota.
    if stack:
        quota = f"the cluster exists; made by {owner_of(stack)} at {made_at(stack)}"
    elif is_block:
        quota = "a Capacity Block needs no quota, and was paid when it was bought"
    else:
        quota = check_quota(account, hardware, settings.nodes, settings.market)

    image = find_image(account, settings.ami, hardware)
    notes = [quota, f"offered in {join_names(zone_prices)}"]
    notes += _notes(account, settings, image, subnet, reservation)
    account.call("ec2", "describe_key_pairs", KeyNames=[settings.key])
    parameters = {
        **_parameters(account, settings, hardware, subnet),
        "Zone": zone,
        "Market": CAPACITY_BLOCK if is_block else settings.market,
        "ImageId": image.id,
        "RootDevice": image.root_device,
        "Owner": account.identity(),
    }
    costs = list(_costs(account, settings, parameters, zone_prices[zone]))
    volume_price = prices.listed_price(account, "volume")
    return ClusterPlan(
        settings=settings,
        hardware=hardware,
        parameters=parameters,
        costs=costs,
        volume_price=volume_price,
        notes=[note for note in notes if note],
        unknowns=[
            f"whether {zone} has capacity: AWS reveals it only at `up`",
            *account.warnings,
        ],
        other_zones={
            name: zone_prices[name]
            for name in other_zones
            if not _is_above_ceiling(settings, zone_prices[name])
        },
    )


def _named_zone(
    settings: ClusterSettings, subnet: Described, reservation: Described
) -> str | None:
    """That of the subnet, the reservation or the flag; None: any."""
    places = [
        subnet.get("AvailabilityZone"),
        reservation.get("AvailabilityZone"),
        settings.zone,
    ]
    zones = sorted({zone for zone in places if zone is not None})
    if len(zones) > 1:
        raise UsageError(
            f"--subnet, --reservation and --zone are in several zones: {join_names(zones)}",
            next_step="give a --subnet in the zone of the reservation, and no --zone",
        )

    return zones[0] if zones else None


def _zone_prices(
    account: Account,
    settings: ClusterSettings,
    named_zone: str | None,
    *,
    is_block: bool,
) -> dict[str, float | None]:
    """Of an instance for an hour, in the zones where it may be, in the order in which they are
    tried."""
    spot_prices = prices.spot_prices(account, settings.type) if settings.spot else {}
    zones = zones_in_order(account, settings.type, named_zone, spot_prices)
    if settings.spot:
        return {zone: spot_prices.get(zone) for zone in zones}

    price: float | None = 0.0
    if not is_block:
        price = prices.listed_price(account, "instance", instanceType=settings.type)
    return dict.fromkeys(zones, price)


def _notes(
    account: Account,
    settings: ClusterSettings,
    image: Image,
    subnet: Described,
    reservation: Described,
) -> Iterator[str]:
    """What was checked of what exists already."""
    if settings.disk < image.size:
        raise UsageError(
            f"--disk: {settings.disk} GiB, and the image {image.id} has {image.size}",
            next_step=f"give --disk {image.size} or more, or another --ami",
        )

    if image.size:
        yield f"the image needs {image.size} GiB of {settings.disk}"
    if reservation:
        yield _reservation_note(reservation)
    if settings.bucket:
        check_bucket(account, settings.bucket)
        yield f"the nodes may read and write s3://{settings.bucket}, and no other bucket"
    if subnet:
        yield from _s3_notes(account, subnet["VpcId"])
    if settings.copies_drumline:
        yield f"launch copies this installation to the nodes: drumline {version('drumline')}"


def find_reservation(
    account: Account, settings: ClusterSettings, *, is_up: bool
) -> Described:
    """As AWS describes it; empty without --reservation. Raises if the nodes cannot use it. `is_up`:
    they do already."""
    if settings.reservation is None:
        return {}

    answer = account.call(
        "ec2",
        "describe_capacity_reservations",
        CapacityReservationIds=[settings.reservation],
    )
    reservation = dict(answer["CapacityReservations"][0])
    available = reservation["AvailableInstanceCount"]
    what = ""
    if reservation["InstanceType"] != settings.type:
        what = f"is for {reservation['InstanceType']}, not for {settings.type}"
    elif reservation["State"] != "active":
        begins = reservation.get("StartDate")
        what = f"is {reservation['State']}{f', from {begins:%Y-%m-%d %H:%M} UTC' if begins else ''}"
    elif available < settings.nodes and not is_up:
        what = (
            f"has {plural(available, 'free instance')}, and --nodes is {settings.nodes}"
        )
    if what:
        raise UsageError(
            f"--reservation: {settings.reservation} {what}",
            next_step="give another one, or correct --type and --nodes; one that is scheduled has to begin first",
        )

    return reservation


def _reservation_note(reservation: Described) -> str:
    """What is left of it, and until when."""
    ends = reservation.get("EndDate")
    until = (
        f", until {ends:%Y-%m-%d %H:%M} UTC; AWS may end its instances before"
        if ends
        else ""
    )
    return (
        f"{reservation['CapacityReservationId']} has {reservation['AvailableInstanceCount']} of "
        f"{reservation['TotalInstanceCount']} instances free{until}"
    )


def check_bucket(account: Account, bucket: str) -> None:
    """Raise if it does not exist."""
    with account.optional(f"whether s3://{bucket} can be used"):
        try:
            account.call("s3", "head_bucket", Bucket=bucket)
        except AwsError as refused:
            if refused.code != "404":
                raise
            raise UsageError(
                f"--bucket: there is no bucket {bucket!r}",
                next_step=f"correct it, or make it: aws s3 mb s3://{bucket}",
            ) from refused


def _s3_notes(account: Account, vpc: str) -> Iterator[str]:
    """How the nodes of an existing VPC reach S3."""
    of_s3 = filters(
        {"vpc-id": vpc, "service-name": f"com.amazonaws.{account.region}.s3"}
    )
    with account.optional(f"whether {vpc} has an endpoint for S3"):
        what = "VpcEndpoints[].VpcEndpointId"
        if names := account.all("ec2", "describe_vpc_endpoints", what, Filters=of_s3):
            yield f"{vpc} has an endpoint for S3: {join_names(names)}"
        else:
            yield f"{vpc} has no endpoint for S3: through a NAT gateway, each GB costs money"


def _has_one_card(settings: ClusterSettings, hardware: Hardware) -> bool:
    """Whether the instances get one network interface: AWS gives no public address to several."""
    return hardware.num_cards == 1 or not hardware.num_efas or settings.efa is False


def _is_public(
    settings: ClusterSettings, hardware: Hardware, subnet: Described
) -> bool:
    """Whether the instances get public addresses. `subnet`: an existing one, or empty."""
    gives_public_addresses = not subnet or bool(subnet.get("MapPublicIpOnLaunch"))
    return _has_one_card(settings, hardware) and gives_public_addresses


def _parameters(
    account: Account,
    settings: ClusterSettings,
    hardware: Hardware,
    subnet: Described,
) -> dict[str, str]:
    """Those of the stack that follow from the settings."""
    has_one_card = _has_one_card(settings, hardware)
    has_efa = has_one_card and settings.efa is not False and hardware.num_efas > 0
    ends = datetime.now(UTC) + timedelta(hours=settings.hours)
    return {
        "ClusterName": settings.name,
        "InstanceType": settings.type,
        "NodeCount": str(settings.nodes),
        "DiskGiB": str(settings.disk),
        "MaxPrice": f"{settings.max_price:g}"
        if settings.max_price and settings.spot
        else "",
        "PlacementGroup": _flag(settings.placement_group),
        "Efa": _flag(has_efa),
        "Reservation": settings.reservation or "",
        "Bucket": settings.bucket or "",
        "GpuCount": str(hardware.num_gpus),
        "KeyName": settings.key or "",
        "SshFrom": own_network()
        if settings.ssh_from == ME
        else settings.ssh_from or "",
        "SessionManager": _flag(settings.ssm),
        "VpcId": subnet.get("VpcId", ""),
        "SubnetId": settings.subnet or "",
        "PublicAddress": _flag(_is_public(settings, hardware, subnet)),
        "NatGateway": _flag(not has_one_card and not subnet),
        "EndsAt": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "IdleMinutes": str(settings.idle_minutes),
        "Requirements": " ".join(settings.requirements),
        "CopiesDrumline": _flag(settings.copies_drumline),
        **_volume_parameters(account, settings, subnet.get("AvailabilityZone")),
    }


def _volume_parameters(
    account: Account, settings: ClusterSettings, zone: str | None
) -> dict[str, str]:
    """An existing volume has one mount target for each zone; the one of this zone is used if there
    is one."""
    unmounted = [
        kept_volume["FileSystemId"]
        for kept_volume in kept_volumes(account, settings.name)
        if not kept_volume["NumberOfMountTargets"]
    ]
    volume = settings.volume or next(iter(unmounted), "")
    parameters = {"VolumeId": volume, "MountTargetAddress": "", "MountTargetGroup": ""}
    if not volume:
        return parameters

    targets = account.call("efs", "describe_mount_targets", FileSystemId=volume)[
        "MountTargets"
    ]
    for target in targets:
        if target.get("AvailabilityZoneName") == zone:
            groups = account.call(
                "efs",
                "describe_mount_target_security_groups",
                MountTargetId=target["MountTargetId"],
            )
            parameters["MountTargetAddress"] = target["IpAddress"]
            parameters["MountTargetGroup"] = groups["SecurityGroups"][0]

    return parameters


def own_network() -> str:
    """This machine's public address, as AWS sees it."""
    try:
        with urllib.request.urlopen(ADDRESS_URL, timeout=10) as answer:
            return f"{answer.read(64).decode().strip()}/32"
    except (OSError, ValueError) as error:
        raise AwsError(
            f"this machine's public address is not known: {ADDRESS_URL}: {error}",
            next_step="give it: --ssh-from ADDRESS/32",
        ) from error


def _subnet(account: Account, subnet: str | None) -> Described:
    """As AWS describes an existing one; empty for a new VPC."""
    if subnet is None:
        return {}

    return dict(
        account.call("ec2", "describe_subnets", SubnetIds=[subnet])["Subnets"][0]
    )


def _is_above_ceiling(settings: ClusterSettings, price: float | None) -> bool:
    """Whether an instance costs more than --max-price, or what is not known: AWS itself keeps that
    of spot instances."""
    if settings.max_price is None:
        return False
    return not settings.spot if price is None else price > settings.max_price


def _check_ceiling(settings: ClusterSettings, price: float | None) -> None:
    """Raise if an instance costs more than --max-price."""
    if settings.max_price is not None and _is_above_ceiling(settings, price):
        now = (
            f"costs {prices.dollars(price)} an hour" if price else "has no known price"
        )
        raise UsageError(
            f"{settings.type} ({settings.market}) {now}, and --max-price is {prices.dollars(settings.max_price)}",
            next_step="raise --max-price, or give another --type, --zone or --region, or --spot",
        )


def _costs(
    account: Account,
    settings: ClusterSettings,
    parameters: Mapping[str, str],
    price: float | None,
) -> Iterator[prices.Cost]:
    """What is paid by the hour."""
    nodes = settings.nodes
    instances = f"{nodes} x {settings.type} ({parameters['Market']})"
    if settings.spot:
        yield prices.Cost(
            instances,
            prices.times(price, nodes),
            prices.times(settings.max_price, nodes),
        )
    else:
        yield prices.fixed_cost(instances, price, nodes)

    month = prices.listed_price(account, "disk")
    disks = f"{nodes} x encrypted disk of {settings.disk} GiB"
    yield prices.fixed_cost(disks, month, nodes * settings.disk / prices.HOURS_A_MONTH)

    if parameters["PublicAddress"] == "true":
        address_price = prices.listed_price(account, "address")
        yield prices.fixed_cost(f"{nodes} x public address", address_price, nodes)

    if parameters["NatGateway"] == "true":
        what = "NAT gateway until `down`, without what passes through it"
        yield prices.fixed_cost(
            what, prices.listed_price(account, "nat"), ends_with_nodes=False
        )


def _cards(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """EFA-only interfaces as AWS recommends: the second on card 0, if that has EFA, and the first
    on the others."""
    first = 0 if hardware.num_efas >= hardware.num_cards else 1
    for card in range(first, min(hardware.num_cards, first + hardware.num_efas)):
        yield {
            "DeviceIndex": 0 if card else 1,
            "NetworkCardIndex": card,
            "InterfaceType": "efa-only",
            "DeleteOnTermination": True,
            "Groups": [{"Fn::GetAtt": ["Group", "GroupId"]}],
        }


def _flag(value: bool) -> str:
    """As CloudFormation takes it."""
    return "true" if value else "false"


# A way in for ssh, and a way out to packages and AWS: checked before it costs


def check_way_in(
    settings: ClusterSettings, hardware: Hardware, *, is_public: bool
) -> None:
    """`drumline aws launch` must be able to connect by ssh."""
    if settings.key is None:
        raise UsageError(
            "no --key is set, and `drumline aws launch` connects by ssh",
            next_step="give --key NAME, an EC2 key pair, with --ssh-from me or --ssm",
        )

    if settings.ssm:
        check_session_manager("--ssm")
    elif settings.ssh_from is None:
        raise UsageError(
            "ssh would be closed: neither --ssh-from nor --ssm is set, so `drumline aws launch` could not connect",
            next_step="give --ssh-from me, or --ssm",
        )
    elif not is_public:
        _check_private_address(settings, hardware)


def _check_private_address(settings: ClusterSettings, hardware: Hardware) -> None:
    """From outside, instances without a public address are reached through a VPN, or not at all."""
    ssh_from = settings.ssh_from or ME
    if settings.subnet is None or ssh_from == ME or ip_network(ssh_from).is_global:
        cards = plural(hardware.num_cards, "network card")
        where = settings.subnet or f"a new VPC, with {cards} each"
        raise UsageError(
            f"the instances get no public address in {where}, so --ssh-from {ssh_from} cannot reach them",
            next_step="give --ssm in place of --ssh-from, or a --subnet and the network of your VPN; or --no-efa",
        )


def check_session_manager(why: str) -> None:
    """Raise unless its programs are on this machine. `why`: what needs them."""
    missing = [program for program in SESSION_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise UsageError(
            f"{why} needs {join_names(missing)} on this machine, on the PATH",
            next_step=f"install it: {SESSION_MANUAL}; or make the cluster with --ssh-from me",
        )


def check_way_out(
    account: Account,
    settings: ClusterSettings,
    subnet: Described,
    *,
    is_public: bool,
) -> None:
    """The nodes install packages and report to AWS; in an existing subnet, its routes decide
    whether they can."""
    if not subnet:
        return

    target = _default_route(account, subnet)
    if target is None or (target.startswith("igw-") and not is_public):
        way_out = "its route table has no working route for it"
        if target is not None:
            way_out = f"its way out is {target}, which needs public addresses, and these instances get none"
        raise UsageError(
            f"the nodes, which install packages, could not reach the internet in {settings.subnet}: {way_out}",
            next_step="give a --subnet whose route is a NAT gateway, or no --subnet: up makes a VPC",
        )


def _default_route(account: Account, subnet: Described) -> str | None:
    """Where the subnet sends what is for the internet: `igw-...`, or another gateway; None:
    nowhere."""
    by_subnet = {"association.subnet-id": subnet["SubnetId"]}
    main = {"vpc-id": subnet["VpcId"], "association.main": "true"}
    tables = _route_tables(account, by_subnet) or _route_tables(account, main)
    for route in tables[0]["Routes"] if tables else ():
        if (
            route.get("DestinationCidrBlock") == EVERYWHERE
            and route.get("State") != "blackhole"
        ):
            return str(route.get("GatewayId") or "another gateway")

    return None


def _route_tables(account: Account, values: Mapping[str, str]) -> list[Any]:
    return account.all(
        "ec2", "describe_route_tables", "RouteTables", Filters=filters(values)
    )
