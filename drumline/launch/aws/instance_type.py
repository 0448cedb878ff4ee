"""What AWS offers of an instance type in a region: its hardware, the zones that have it, the quota,
and an image."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from drumline.base.errors import UsageError
from drumline.base.text import join_names, plural
from drumline.launch.aws.account import Account, AwsError, Described, filters
from drumline.launch.aws.cluster_settings import ClusterSettings

# Quotas of running vCPUs by how a type begins, and market:
# docs.aws.amazon.com/ec2/latest/instancetypes
_QUOTAS = {
    (r"(a|c|d|h|i|im|is|m|r|t|z)\d", "on-demand"): "L-1216C47A",
    (r"(a|c|d|h|i|im|is|m|r|t|z)\d", "spot"): "L-34B43A08",
    (r"(g|gr|vt)\d", "on-demand"): "L-DB2E81BA",
    (r"(g|gr|vt)\d", "spot"): "L-3819A6DF",
    (r"p\d", "on-demand"): "L-417A185B",
    (r"p[2-4]", "spot"): "L-7212CCBC",
    (r"p5", "spot"): "L-C4BD4855",
}
_DLAMI = (
    "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)
_HARDWARE = """InstanceTypes[].{
    arch: contains(ProcessorInfo.SupportedArchitectures, 'arm64') && 'arm64' || 'x86_64',
    num_vcpus: VCpuInfo.DefaultVCpus,
    num_gpus: sum(GpuInfo.Gpus[].Count || `[0]`),
    gpu: GpuInfo.Gpus[0].Name,
    num_efas: NetworkInfo.EfaInfo.MaximumEfaInterfaces || `0`,
    num_cards: NetworkInfo.MaximumNetworkCards
}"""
_UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/{arch}/hvm/ebs-gp3/ami-id"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Of one instance type, as a cluster uses it."""

    arch: str
    num_vcpus: int
    num_gpus: int
    gpu: str | None
    num_efas: int
    """EFA interfaces at most; 0: it has none, or it is turned off."""
    num_cards: int
    """Network cards; without EFA, one is used."""


def find_hardware(account: Account, settings: ClusterSettings) -> Hardware:
    """As AWS describes the type in this region."""
    if not settings.type:
        raise UsageError(
            "no instance type is set",
            next_step="give --type, such as --type g6.12xlarge",
        )

    request = {"InstanceTypes": [settings.type]}
    try:
        types = account.all("ec2", "describe_instance_types", _HARDWARE, **request)
    except AwsError as refused:
        if refused.code not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        raise UsageError(
            f"--type: there is no instance type {settings.type!r} in {account.region}",
            next_step="correct it, or give another --region; aws.amazon.com/ec2/instance-types has all types",
        ) from refused

    hardware = Hardware(**types[0])
    if settings.efa and not hardware.num_efas:
        raise UsageError(
            f"{settings.type} has no EFA",
            next_step="leave --efa out, or give another --type",
        )

    if settings.efa is False or not hardware.num_efas:
        return replace(hardware, num_efas=0, num_cards=1)
    return hardware


def check_quota(account: Account, settings: ClusterSettings, num_vcpus: int) -> str:
    """Raise if the nodes are more than the account may ever run; a sentence about the quota, empty
    if it may not be read. What else runs counts too, which AWS does at `up`."""
    what = f"{settings.type} ({settings.market})"
    code = _quota_code(settings.type, settings.market)
    if code is None:
        return f"quota of {what}: not known to drumline, so it was not checked"

    quota: Described = {}
    with account.optional(f"the quota of {what}"):
        answer = account.call(
            "service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code
        )
        quota = answer["Quota"]
    if not quota:
        return ""

    needed = num_vcpus * settings.nodes
    described = f"quota {quota['QuotaName']!r}: {quota['Value']:.0f} vCPUs"
    if needed > quota["Value"]:
        raise AwsError(
            f"{plural(settings.nodes, 'instance')} of {settings.type} need {needed} vCPUs; {described}",
            next_step="ask for more, which may take days: https://console.aws.amazon.com/servicequotas/home/services/"
            f"ec2/quotas/{code}?region={account.region}; or give fewer --nodes or another --type",
        )

    return f"{described}, {needed} needed"


def _quota_code(instance_type: str, market: str) -> str | None:
    """None: drumline does not know it."""
    for (types, of_market), code in _QUOTAS.items():
        if market == of_market and re.match(types, instance_type):
            return code

    return None


def find_image(account: Account, ami: str | None, hardware: Hardware) -> Described:
    """The given image, or the newest default one."""
    if ami is None:
        name = _UBUNTU.format(arch=hardware.arch.replace("x86_64", "amd64"))
        if hardware.num_gpus:
            name = _DLAMI.format(arch=hardware.arch)
        ami = str(account.call("ssm", "get_parameter", Name=name)["Parameter"]["Value"])

    images = account.call("ec2", "describe_images", ImageIds=[ami])["Images"]
    return dict(images[0])


def check_disk(settings: ClusterSettings, image: Described) -> str:
    """Raise if the image is larger than the disk; a sentence about both."""
    sizes = [
        disk["Ebs"]["VolumeSize"]
        for disk in image["BlockDeviceMappings"]
        if disk["DeviceName"] == image.get("RootDeviceName")
    ]
    if not sizes:
        return ""
    size = sizes[0]
    if settings.disk < size:
        raise UsageError(
            f"--disk: {settings.disk} GiB, and the image {image['ImageId']} has {size}",
            next_step=f"give --disk {size} or more, or another --ami",
        )

    return f"the image needs {size} GiB of {settings.disk}"


def zones_that_offer(account: Account, instance_type: str, named_zone: str | None) -> list[str]:
    """The named zone, if it offers the type; otherwise all that do."""
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
        return [zone for zone in zones if len(zone) == len(account.region) + 1] or zones

    if named_zone not in zones:
        raise UsageError(
            f"{named_zone} does not offer {instance_type}; {join_names(zones)} do",
            next_step="give one of these as --zone (or a subnet in it), or another --type",
        )

    return [named_zone]
