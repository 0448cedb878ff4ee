"""What AWS offers of an instance type in a region: its hardware, the zones that have it, the quota,
and an image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from drumline.base.errors import UsageError
from drumline.base.text import join_names, plural
from drumline.launch.aws.account import Account, AwsError

# Quotas of running vCPUs by the first letters of a type and the market:
# docs.aws.amazon.com/ec2/latest/instancetypes
_STANDARD = ("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z")
_QUOTAS: Mapping[tuple[str, str], str] = {
    ("standard", "on-demand"): "L-1216C47A",
    ("standard", "spot"): "L-34B43A08",
    ("g", "on-demand"): "L-DB2E81BA",
    ("g", "spot"): "L-3819A6DF",
    ("p", "on-demand"): "L-417A185B",
    ("p", "spot"): "L-7212CCBC",
    ("p5", "spot"): "L-C4BD4855",
}
_DLAMI = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"
_UBUNTU_ARCHS = {"x86_64": "amd64", "arm64": "arm64"}


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
    gpus = described.get("GpuInfo", {}).get("Gpus", [])
    archs = described["ProcessorInfo"]["SupportedArchitectures"]
    return Hardware(
        name=name,
        arch="arm64" if "arm64" in archs else "x86_64",
        num_vcpus=described["VCpuInfo"]["DefaultVCpus"],
        num_gpus=sum(gpu["Count"] for gpu in gpus),
        gpu=gpus[0]["Name"] if gpus else "",
        num_efas=network.get("EfaInfo", {}).get(
            "MaximumEfaInterfaces", int(network.get("EfaSupported", False))
        ),
        num_cards=network.get("MaximumNetworkCards", 1),
    )


def _zones_with(account: Account, instance_type: str) -> list[str]:
    offered = account.all(
        "ec2",
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [instance_type]}],
    )
    if not offered:
        raise UsageError(
            f"{account.region} does not offer {instance_type}",
            next_step="give another --region or another --type",
        )
    return sorted(offer["Location"] for offer in offered)


def check_quota(account: Account, hardware: Hardware, num_nodes: int, market: str) -> str:
    """Raise if the nodes are more than the account may ever run; a sentence about the quota. What
    else runs counts too, which AWS does at `up`."""
    if (code := _quota_code(hardware.name, market)) is None:
        return f"quota of {hardware.name} ({market}): not known to drumline, so it was not checked"
    request = {"ServiceCode": "ec2", "QuotaCode": code}
    quota = account.call("service-quotas", "get_service_quota", **request)["Quota"]
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
    match = re.match(r"([a-z]+)(\d*)", instance_type)
    if match is None:
        return None
    letters = match[1]
    number = int(match[2] or 0)
    family = "standard" if letters in _STANDARD else letters
    family = {"gr": "g", "vt": "g"}.get(family, family)
    if family == "p" and market == "spot" and number >= 5:
        family = f"p{number}"
    return _QUOTAS.get((family, market))


@dataclass(frozen=True, kw_only=True)
class Image:
    id: str
    root_device: str


def find_image(account: Account, ami: str | None, hardware: Hardware) -> Image:
    if ami is None:
        arch = hardware.arch if hardware.num_gpus else _UBUNTU_ARCHS[hardware.arch]
        name = (_DLAMI if hardware.num_gpus else _UBUNTU).format(arch=arch)
        ami = str(account.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"])
    images = account.call("ec2", "describe_images", ImageIds=[ami])["Images"]
    return Image(id=ami, root_device=images[0].get("RootDeviceName") or "/dev/sda1")


def choose_zone(
    account: Account, instance_type: str, named_zone: str | None, spot_prices: Mapping[str, float]
) -> str:
    """The named zone, if it offers the type; otherwise the cheapest, or the first, that does."""
    zones = _zones_with(account, instance_type)
    if named_zone is None:
        # Local Zones, whose names are longer, are elsewhere, cost more, and have no EFS.
        ordinary_zones = [zone for zone in zones if len(zone) == len(account.region) + 1]
        return min(
            ordinary_zones or zones, key=lambda zone: (spot_prices.get(zone, float("inf")), zone)
        )
    if named_zone not in zones:
        what = f"{named_zone} does not offer {instance_type}; {join_names(zones)} do"
        raise UsageError(
            what, next_step="give one of these as --zone (or a subnet in it), or another --type"
        )
    return named_zone
