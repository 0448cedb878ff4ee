"""The whole change before it is made: every check, the price, and the parameters of the stack.
Nothing is touched."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

from drumline.base.errors import UsageError
from drumline.base.text import columns, join_names, plural
from drumline.config.fields import flag_text
from drumline.launch.aws import prices
from drumline.launch.aws.account import Account, AwsError, Described
from drumline.launch.aws.cluster_access import (
    check_way_in,
    check_way_out,
    own_network,
    s3_notes,
)
from drumline.launch.aws.cluster_settings import ME, ClusterSettings
from drumline.launch.aws.instance_type import (
    Hardware,
    check_disk,
    check_quota,
    find_hardware,
    find_image,
    zones_that_offer,
)
from drumline.launch.aws.stack import (
    find_cluster,
    kept_volumes,
    made_at,
    owner_of,
    parameters_of,
)
from drumline.launch.templates import render

CAPACITY_BLOCK = "capacity-block"


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """What `up` makes, and what it costs."""

    settings: ClusterSettings
    hardware: Hardware
    parameters: Mapping[str, str]
    costs: Sequence[prices.Cost]
    volume_price: float
    notes: Sequence[str]
    """What was checked."""
    unknowns: Sequence[str]
    """What cannot be known, or may not be read."""
    other_zones: Mapping[str, float]
    """Where it is tried next if the zone has no capacity, with the price of an instance."""

    def lines(self) -> list[str]:
        """What the user confirms."""
        hours = self.settings.hours
        total = prices.Cost(
            "together, beside EFS and traffic",
            sum(cost.an_hour for cost in self.costs),
            sum(cost.most_an_hour for cost in self.costs),
        )
        rows = [("what is made", "an hour", f"{hours:g} h at most")]
        rows += [cost.row(hours) for cost in self.costs]
        if not self.parameters["SubnetId"]:
            rows.append(("VPC with a gateway endpoint for S3", "free", "free"))
        group = "security group, role, launch template, Auto Scaling group"
        rows.append((group, "free", "free"))
        if not self.parameters["VolumeId"]:
            price = prices.dollars(self.volume_price)
            volume = f"encrypted EFS volume, {price} for a GB a month"
            rows.append((volume, "by use", "by use"))
        rows.append(total.row(hours))

        table = columns(rows, right=(1, 2))
        return render(
            "aws/plan.txt.j2", plan=self, table=table, total=total, prices=prices
        ).splitlines()


def make_plan(
    account: Account, settings: ClusterSettings, full_zones: Collection[str] = ()
) -> ClusterPlan:
    """Raises at the first check that fails. `full_zones`: where AWS had no capacity."""
    hardware = find_hardware(account, settings)
    stack = find_cluster(account, settings)
    subnet = _subnet(account, settings)
    # AWS gives no public address to several network cards.
    is_public = hardware.num_cards == 1 and (not subnet or subnet["MapPublicIpOnLaunch"])
    check_way_in(settings, hardware, is_public=is_public)
    if subnet:
        check_way_out(account, subnet, is_public=is_public)

    reservation = find_reservation(account, settings, is_up=stack is not None)
    is_block = reservation.get("ReservationType") == CAPACITY_BLOCK

    named_zone = _named_zone(settings, subnet, reservation)
    if named_zone is None and stack is not None:
        named_zone = parameters_of(stack)["Zone"]
    zone_prices = _zone_prices(account, settings, named_zone, is_block=is_block)
    zone, *other_zones = [name for name in zone_prices if name not in full_zones]
    _check_ceiling(settings, zone_prices[zone])

    image = find_image(account, settings.ami, hardware)
    account.call("ec2", "describe_key_pairs", KeyNames=[settings.key])
    notes = [
        _quota_note(account, settings, hardware, stack, is_block=is_block),
        f"offered in {join_names(zone_prices)}",
        check_disk(settings, image),
        *_notes(account, settings, subnet, reservation),
    ]
    parameters = {
        **_parameters(account, settings, hardware, subnet, is_public=is_public),
        "Zone": zone,
        "Market": CAPACITY_BLOCK if is_block else settings.market,
        "ImageId": image["ImageId"],
        "RootDevice": image.get("RootDeviceName") or "/dev/sda1",
        "Owner": account.identity(),
    }
    return ClusterPlan(
        settings=settings,
        hardware=hardware,
        parameters=parameters,
        costs=list(_costs(account, settings, parameters, zone_prices[zone])),
        volume_price=prices.listed_price(account, "volume"),
        notes=list(filter(None, notes)),
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


def _subnet(account: Account, settings: ClusterSettings) -> Described:
    """That of the flag, as AWS describes it; empty: `up` makes one."""
    if settings.subnet is None:
        return {}
    answer = account.call("ec2", "describe_subnets", SubnetIds=[settings.subnet])
    return dict(answer["Subnets"][0])


def _quota_note(
    account: Account,
    settings: ClusterSettings,
    hardware: Hardware,
    stack: Described | None,
    *,
    is_block: bool,
) -> str:
    """Raises if the quota is too small. The nodes of a cluster that is up are part of what is in use."""
    if stack:
        return f"the cluster exists; made by {owner_of(stack)} at {made_at(stack)}"
    if is_block:
        return "a Capacity Block needs no quota, and was paid when it was bought"
    return check_quota(account, settings, hardware.num_vcpus)


def _named_zone(settings: ClusterSettings, subnet: Described, reservation: Described) -> str | None:
    """That of the subnet, the reservation or the flag; None: any."""
    places = (
        subnet.get("AvailabilityZone"),
        reservation.get("AvailabilityZone"),
        settings.zone,
    )
    zones = {zone for zone in places if zone is not None}
    if len(zones) > 1:
        raise UsageError(
            f"--subnet, --reservation and --zone are in several zones: {join_names(sorted(zones))}",
            next_step="give a --subnet in the zone of the reservation, and no --zone",
        )

    return next(iter(zones), None)


def _zone_prices(
    account: Account,
    settings: ClusterSettings,
    named_zone: str | None,
    *,
    is_block: bool,
) -> dict[str, float]:
    """Of an instance for an hour, in the zones where it may be, in the order in which they are
    tried: the cheapest first."""
    zones = zones_that_offer(account, settings.type, named_zone)
    if settings.spot:
        spot_prices = prices.spot_prices(account, settings.type)
        by_zone = {zone: spot_prices.get(zone, prices.UNKNOWN) for zone in zones}
        return dict(sorted(by_zone.items(), key=lambda item: item[1]))

    if is_block:
        return dict.fromkeys(zones, 0.0)

    price = prices.listed_price(account, "instance", instanceType=settings.type)
    return dict.fromkeys(zones, price)


def _notes(
    account: Account,
    settings: ClusterSettings,
    subnet: Described,
    reservation: Described,
) -> Iterator[str]:
    """What was checked of what exists already."""
    if reservation:
        until = ""
        if ends := reservation.get("EndDate"):
            until = f", until {ends:%Y-%m-%d %H:%M} UTC; AWS may end its instances before"
        yield (
            f"{settings.reservation} has {reservation['AvailableInstanceCount']} of "
            f"{reservation['TotalInstanceCount']} instances free{until}"
        )
    if settings.bucket:
        check_bucket(account, settings.bucket)
        yield f"the nodes may read and write s3://{settings.bucket}, and no other bucket"
    if subnet:
        yield from s3_notes(account, subnet["VpcId"])
    if settings.copies_drumline:
        yield f"launch copies this installation to the nodes: drumline {version('drumline')}"


def find_reservation(account: Account, settings: ClusterSettings, *, is_up: bool) -> Described:
    """As AWS describes it; empty without --reservation. Raises if the nodes cannot use it. `is_up`:
    they do already."""
    if settings.reservation is None:
        return {}

    answer = account.call(
        "ec2", "describe_capacity_reservations", CapacityReservationIds=[settings.reservation]
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
        what = f"has {plural(available, 'free instance')}, and --nodes is {settings.nodes}"
    if what:
        raise UsageError(
            f"--reservation: {settings.reservation} {what}",
            next_step="give another one, or correct --type and --nodes; one that is scheduled has to begin first",
        )

    return reservation


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


def _parameters(
    account: Account,
    settings: ClusterSettings,
    hardware: Hardware,
    subnet: Described,
    *,
    is_public: bool,
) -> dict[str, str]:
    """Those of the stack that follow from the settings."""
    limit = settings.max_price if settings.spot else None
    ssh_from = own_network() if settings.ssh_from == ME else settings.ssh_from
    ends = datetime.now(UTC) + timedelta(hours=settings.hours)
    values = {
        "ClusterName": settings.name,
        "InstanceType": settings.type,
        "NodeCount": settings.nodes,
        "DiskGiB": settings.disk,
        "MaxPrice": f"{limit:g}" if limit else "",
        "PlacementGroup": settings.placement_group,
        "Efa": hardware.num_cards == 1 and hardware.num_efas > 0,
        "Reservation": settings.reservation,
        "Bucket": settings.bucket,
        "GpuCount": hardware.num_gpus,
        "KeyName": settings.key,
        "SshFrom": ssh_from,
        "SessionManager": settings.ssm,
        "VpcId": subnet.get("VpcId"),
        "SubnetId": settings.subnet,
        "PublicAddress": is_public,
        "EndsAt": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "IdleMinutes": settings.idle_minutes,
        "Requirements": " ".join(settings.requirements),
        "CopiesDrumline": settings.copies_drumline,
        **_volume_parameters(account, settings, subnet.get("AvailabilityZone")),
    }
    return {name: "" if value is None else flag_text(value) for name, value in values.items()}


def _volume_parameters(
    account: Account, settings: ClusterSettings, zone: str | None
) -> dict[str, str]:
    """An existing volume has one mount target for each zone; the one of this zone is used if there
    is one."""
    parameters = {"VolumeId": "", "MountTargetAddress": "", "MountTargetGroup": ""}
    if settings.volume is None:
        for volume in kept_volumes(account, settings.name):
            if not volume["NumberOfMountTargets"]:
                return {**parameters, "VolumeId": volume["FileSystemId"]}
        return parameters

    parameters["VolumeId"] = settings.volume
    targets = account.all(
        "efs", "describe_mount_targets", "MountTargets", FileSystemId=settings.volume
    )
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


def _is_above_ceiling(settings: ClusterSettings, price: float) -> bool:
    """Whether an instance costs more than --max-price, or what is not known: AWS itself keeps that
    of spot instances."""
    is_left_to_aws = settings.spot and price == prices.UNKNOWN
    return price > (settings.max_price or prices.UNKNOWN) and not is_left_to_aws


def _check_ceiling(settings: ClusterSettings, price: float) -> None:
    """Raise if an instance costs more than --max-price."""
    if _is_above_ceiling(settings, price):
        now = f"costs {prices.dollars(price)} an hour"
        if price == prices.UNKNOWN:
            now = "has no known price"
        ceiling = prices.dollars(settings.max_price or prices.UNKNOWN)
        raise UsageError(
            f"{settings.type} ({settings.market}) {now}, and --max-price is {ceiling}",
            next_step="raise --max-price, or give another --type, --zone or --region, or --spot",
        )


def _costs(
    account: Account,
    settings: ClusterSettings,
    parameters: Mapping[str, str],
    price: float,
) -> Iterator[prices.Cost]:
    """What is paid by the hour."""
    nodes = settings.nodes
    instances = f"{nodes} x {settings.type} ({parameters['Market']})"
    limit = price
    if settings.spot:
        limit = settings.max_price or prices.UNKNOWN
    yield prices.Cost(instances, price * nodes, limit * nodes)

    month = prices.listed_price(account, "disk")
    disks = f"{nodes} x encrypted disk of {settings.disk} GiB"
    yield prices.fixed_cost(disks, month, nodes * settings.disk / prices.HOURS_A_MONTH)

    if parameters["PublicAddress"] == "true":
        address_price = prices.listed_price(account, "address")
        yield prices.fixed_cost(f"{nodes} x public address", address_price, nodes)
    elif not settings.subnet:
        what = "NAT gateway until `down`, without what passes through it"
        yield prices.fixed_cost(what, prices.listed_price(account, "nat"), ends_with_nodes=False)
