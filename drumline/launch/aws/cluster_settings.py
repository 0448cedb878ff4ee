"""What a cluster is: flags of `drumline aws`, or the same names in the section [aws] of a TOML
file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from drumline.base.errors import ConfigError, did_you_mean
from drumline.base.untrusted import read_toml
from drumline.config.config_file import CLUSTER_SECTION
from drumline.config.fields import Mismatch, from_value, without_none
from drumline.config.flags import REPEATED, FlagTable
from drumline.config.schema import Count, CountOrZero, Positive
from drumline.launch.aws.account import Account, connect
from drumline.launch.aws.install import (
    THIS_INSTALLATION,
    copies_drumline,
    node_requirements,
    wrong_install,
)

ME = "me"
# A stack's name is `drumline-NAME`, and an IAM role's name has that and more in 64 letters.
NAME = re.compile(r"[a-z][a-z0-9-]{0,29}")
STACK_PREFIX = "drumline-"
WIDEST_PREFIX = 8
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Of AWS: user tags cannot begin with `aws:`, and one resource has at most 50 of them.
USER_TAG = re.compile(r"(?!(?i:aws|drumline):|Name=)[\w .:/=+@-]{1,128}?=[\w .:/=+@-]{0,256}")
MOST_TAGS = 40


def _flag(group: str, default: Any, takes: str, help_text: str) -> Any:
    """A field with this default that is a flag too, in this group of the help."""
    return field(default=default, metadata={"group": group, "texts": (takes, help_text)})


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The settings, each with its group, its value and its text in the help."""

    name: str = _flag(
        "where",
        "train",
        "NAME",
        "The cluster's name; everything that belongs to it is tagged with it [train].",
    )
    region: str | None = _flag(
        "where",
        None,
        "REGION",
        "The region [boto3's own default: AWS_REGION or ~/.aws/config].",
    )
    profile: str | None = _flag(
        "where",
        None,
        "NAME",
        "The profile of ~/.aws/config [boto3's own default].",
    )
    type: str = _flag(
        "cluster",
        "",
        "TYPE",
        "The instance type, such as g6.12xlarge or p5.48xlarge.",
    )
    nodes: Count = _flag("cluster", 2, "N", "The number of instances [2].")
    spot: bool = _flag(
        "cluster",
        False,
        "",
        "Spot instances: cheaper, and AWS may take one back with two minutes' notice.",
    )
    max_price: Positive | None = _flag(
        "cluster",
        None,
        "USD",
        "The most that one instance may cost an hour: a higher price is refused.",
    )
    zone: str | None = _flag(
        "cluster",
        None,
        "ZONE",
        "The zone, such as us-east-1a [all that offer the type, one after another until one has capacity; with "
        "--spot the cheapest first].",
    )
    reservation: str | None = _flag(
        "cluster",
        None,
        "ID",
        "A capacity reservation or a Capacity Block (cr-...), with its zone; it has to be active.",
    )
    placement_group: bool = _flag(
        "cluster",
        False,
        "",
        "Close together in the data center: less latency, and less often capacity.",
    )
    efa: bool | None = _flag(
        "cluster",
        None,
        "",
        "Elastic Fabric Adapter [on for a type that has it]; --no-efa turns it off.",
    )
    ami: str | None = _flag(
        "cluster",
        None,
        "AMI",
        "The image, with apt [AWS's base Deep Learning AMI for GPUs, otherwise Ubuntu 24.04].",
    )
    disk: Count = _flag("cluster", 150, "GIB", "The encrypted disk of each instance [150].")
    install: str = _flag(
        "cluster",
        THIS_INSTALLATION,
        "REQUIREMENTS",
        "What the nodes get, pinned; `drumline` is this installation, copied to them [drumline].",
    )
    tag: tuple[str, ...] = _flag(
        "cluster",
        (),
        "KEY=VALUE",
        "A tag for everything that is made, as for cost allocation; may be repeated.",
    )
    key: str | None = _flag("reach", None, "NAME", "The EC2 key pair for ssh; launch needs one.")
    ssh_from: str | None = _flag(
        "reach",
        None,
        "me | CIDR",
        "Open ssh for this machine's public address, or for a network [closed].",
    )
    ssm: bool = _flag(
        "reach",
        False,
        "",
        "ssh through Session Manager, with no open port; needs the session-manager-plugin here.",
    )
    subnet: str | None = _flag(
        "reach",
        None,
        "SUBNET",
        "An existing subnet, with a way to the internet [a new VPC].",
    )
    volume: str | None = _flag(
        "reach",
        None,
        "FS",
        "An existing EFS volume [a new one, or the one that this cluster kept].",
    )
    bucket: str | None = _flag(
        "reach",
        None,
        "NAME",
        "An S3 bucket that the nodes may read and write, by their role [none].",
    )
    hours: Positive = _flag(
        "ends",
        24.0,
        "H",
        "All instances end after this long, whatever runs [24]. AWS keeps this limit.",
    )
    idle_minutes: CountOrZero = _flag(
        "ends",
        60,
        "MIN",
        "An instance ends itself after this long with idle GPUs and CPUs [60]; 0: never.",
    )

    @property
    def stack(self) -> str:
        """The name of the CloudFormation stack."""
        return f"{STACK_PREFIX}{self.name}"

    @property
    def copies_drumline(self) -> bool:
        """Whether the nodes get what runs here, over ssh."""
        return copies_drumline(self.install)

    @property
    def requirements(self) -> list[str]:
        """What pip installs on a node when it starts."""
        return node_requirements(self.install)

    @property
    def tags(self) -> dict[str, str]:
        """Of the user, for everything that is made."""
        return dict(tag.split("=", maxsplit=1) for tag in self.tag)

    @property
    def market(self) -> Literal["spot", "on-demand"]:
        """As prices and quotas call it."""
        return "spot" if self.spot else "on-demand"


KINDS = {
    name: without_none(kind)
    for name, kind in get_type_hints(ClusterSettings, include_extras=True).items()
}


def _flags(group: str) -> FlagTable:
    """The flags of one group of the help."""
    return {
        _flag_of(setting.name): (
            REPEATED if setting.name == "tag" else KINDS[setting.name],
            *setting.metadata["texts"],
        )
        for setting in fields(ClusterSettings)
        if setting.metadata["group"] == group
    }


def _flag_of(name: str) -> str:
    """The flag of a setting."""
    return name.replace("_", "-")


WHERE: FlagTable = {
    **_flags("where"),
    "config": (
        str,
        "FILE",
        "Read the section [aws] of a TOML file: the same names, with _ for -. Flags override it.",
    ),
}
CLUSTER = _flags("cluster")
REACH = _flags("reach")
ENDS = _flags("ends")
SETTINGS: FlagTable = {**WHERE, **CLUSTER, **REACH, **ENDS}


def settings_from(
    flags: Mapping[str, Any], problems: list[str], *, copies_folder: bool = False
) -> ClusterSettings:
    """Flags override the file; what is wrong is added to `problems`. `copies_folder`: nodes get
    this folder before they install anything."""
    values = _from_file(Path(flags["config"]), problems) if "config" in flags else {}
    for name in KINDS:
        if _flag_of(name) in flags:
            values[name] = flags[_flag_of(name)]
    values["tag"] = tuple(values.get("tag", ()))

    settings = ClusterSettings(**values)
    problems += _wrong_settings(settings)
    problems += wrong_install(settings.install, copies_folder=copies_folder)
    return settings


def account_and_settings(
    flags: Mapping[str, Any], problems: list[str], verb: str
) -> tuple[Account, ClusterSettings]:
    """Raises if there is a problem, also one that was found before."""
    settings = settings_from(flags, problems)
    if problems:
        raise ConfigError(problems, next_step=f"read drumline aws {verb} --help")
    return connect(settings.region, settings.profile), settings


def _from_file(path: Path, problems: list[str]) -> dict[str, Any]:
    """The section [aws] of a TOML file."""
    try:
        document = read_toml(path, follow_links=True)
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
        return {}

    section = document.get(CLUSTER_SECTION)
    if not isinstance(section, dict):
        problems.append(f"{path}: there is no section [{CLUSTER_SECTION}]")
        return {}

    values = {}
    for name, value in section.items():
        try:
            if name not in KINDS:
                raise Mismatch(f"unknown setting; {did_you_mean(name, KINDS)}")
            values[name] = from_value(KINDS[name], value)
        except Mismatch as mismatch:
            problems.append(f"{path}: {CLUSTER_SECTION}.{name}: {mismatch}")

    return values


def _wrong_settings(settings: ClusterSettings) -> Iterator[str]:
    """What is wrong with these values, or with two of them together."""
    if not NAME.fullmatch(settings.name):
        yield f"--name: {settings.name!r} is not at most 30 lowercase letters, digits and dashes, a letter first"
    if settings.ssh_from not in (None, ME):
        try:
            network = ipaddress.IPv4Network(settings.ssh_from or "")
            if network.prefixlen < WIDEST_PREFIX:
                yield f"--ssh-from: {network} is open to (almost) the whole internet; give `me` or a smaller network"
        except ValueError as error:
            yield f"--ssh-from: {error}; give `me` or a network such as 192.0.2.7/32"
    if settings.ssm and settings.ssh_from:
        yield "--ssm and --ssh-from exclude each other: Session Manager needs no open port"
    if settings.spot and settings.reservation:
        yield "--spot and --reservation exclude each other: a reservation is not of the spot market"
    if settings.bucket is not None and not BUCKET.fullmatch(settings.bucket):
        yield f"--bucket: {settings.bucket!r} is not the name of a bucket; write NAME, without s3:// and a path"
    for tag in settings.tag:
        if not USER_TAG.fullmatch(tag):
            yield f"--tag: {tag!r} is not KEY=VALUE in AWS's letters, or is not yours (aws:, drumline:, Name)"
    if len(settings.tag) > MOST_TAGS:
        yield f"--tag: {len(settings.tag)} tags, and AWS takes {MOST_TAGS} beside those of drumline"
