"""What a cluster is: flags of `drumline aws`, or the same names in the section [aws] of a TOML file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from drumline.aws.account import Account, connect
from drumline.config.config_file import CLUSTER_SECTION
from drumline.config.fields import Mismatch, from_value
from drumline.config.flags import FlagTable
from drumline.config.schema import Count, CountOrZero, Positive
from drumline.errors import ConfigError, did_you_mean
from drumline.text import CREDENTIALS
from drumline.untrusted import TEXT_BYTES, parse_toml, read_regular

ME = "me"
# A stack's name is `drumline-NAME`, and an IAM role's name has that and more in 64 letters.
NAME = re.compile(r"[a-z][a-z0-9-]{0,29}")
STACK_PREFIX = "drumline-"
# Part of a shell script on the nodes.
REQUIREMENT = re.compile(r"[A-Za-z0-9_.,:/@+=\[\]#&~-]+")
PINNED = re.compile(r"==[0-9]|@[0-9a-f]{40}\b|\.whl$")
# A wheel or a folder of this machine, as pip takes it: dist/mine-1.0-py3-none-any.whl, .[train], or file:///...
LOCAL = re.compile(r"(\.{0,2}/.*|\.{1,2}|[^:]*\.whl)(\[.*\])?|.*\bfile:.*")
WIDEST_PREFIX = 8

WHERE: FlagTable = {
    "name": (str, "NAME", "The cluster's name; everything that belongs to it is tagged with it [train]."),
    "region": (str, "REGION", "The region [boto3's own default: AWS_REGION or ~/.aws/config]."),
    "profile": (str, "NAME", "The profile of ~/.aws/config [boto3's own default]."),
    "config": (str, "FILE", "Read the section [aws] of a TOML file: the same names, with _ for -. Flags override it."),
}
CLUSTER: FlagTable = {
    "type": (str, "TYPE", "The instance type, such as g6.12xlarge or p5.48xlarge."),
    "nodes": (Count, "N", "The number of instances [2]."),
    "spot": (bool, "", "Spot instances: cheaper, and AWS may take one back with two minutes' notice."),
    "max-price": (Positive, "USD", "The most that one instance may cost an hour: a higher price is refused."),
    "zone": (str, "ZONE", "The zone, such as us-east-1a [the first that offers the type; with --spot the cheapest]."),
    "placement-group": (bool, "", "Close together in the data center: less latency, and less often capacity."),
    "efa": (bool, "", "Elastic Fabric Adapter [on for a type that has it]; --no-efa turns it off."),
    "ami": (str, "AMI", "The image, with apt [AWS's base Deep Learning AMI for GPUs, otherwise Ubuntu 24.04]."),
    "disk": (Count, "GIB", "The encrypted disk of each instance [150]."),
    "install": (str, "REQUIREMENTS", "What pip installs on the nodes, pinned [this version, if it is on an index]."),
}
REACH: FlagTable = {
    "key": (str, "NAME", "The EC2 key pair for ssh; launch needs one."),
    "ssh-from": (str, "me | CIDR", "Open ssh for this machine's public address, or for a network [closed]."),
    "ssm": (bool, "", "ssh through Session Manager, with no open port; needs the session-manager-plugin here."),
    "subnet": (str, "SUBNET", "An existing subnet, with a way to the internet [a new VPC]."),
    "volume": (str, "FS", "An existing EFS volume [a new one, or the one that this cluster kept]."),
}
ENDS: FlagTable = {
    "hours": (Positive, "H", "All instances end after this long, whatever runs [24]. AWS keeps this limit."),
    "idle-minutes": (
        CountOrZero,
        "MIN",
        "An instance ends itself after this long with idle GPUs and CPUs [60]; 0: never.",
    ),
}
SETTINGS: FlagTable = {**WHERE, **CLUSTER, **REACH, **ENDS}


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    name: str = "train"
    region: str | None = None
    profile: str | None = None
    type: str = ""
    nodes: int = 2
    spot: bool = False
    max_price: float | None = None
    zone: str | None = None
    placement_group: bool = False
    efa: bool | None = None
    ami: str | None = None
    disk: int = 150
    install: str | None = None
    key: str | None = None
    ssh_from: str | None = None
    ssm: bool = False
    subnet: str | None = None
    volume: str | None = None
    hours: float = 24.0
    idle_minutes: int = 60

    @property
    def stack(self) -> str:
        return f"{STACK_PREFIX}{self.name}"

    @property
    def requirements(self) -> list[str]:
        """What pip installs: by default the version that runs here, with its linter, which is a distribution too."""
        if self.install is not None:
            return self.install.split()
        return [f"drumline[aws,storage]=={version('drumline')}", f"drumline-lint=={version('drumline-lint')}"]

    @property
    def market(self) -> Literal["spot", "on-demand"]:
        return "spot" if self.spot else "on-demand"


def settings_from(given: Mapping[str, Any], problems: list[str], *, copies_folder: bool = False) -> ClusterSettings:
    """Flags override the file; what is wrong is added to `problems`. `copies_folder`: nodes get this folder before they
    install anything."""
    values = _from_file(Path(given["config"]), problems) if "config" in given else {}
    names = {field.name for field in fields(ClusterSettings)}
    values |= {name.replace("-", "_"): value for name, value in given.items() if name.replace("-", "_") in names}
    settings = ClusterSettings(**values)
    problems += [*_wrong_settings(settings), *_wrong_install(settings, copies_folder=copies_folder)]
    return settings


def account_and_settings(given: Mapping[str, Any], problems: list[str], verb: str) -> tuple[Account, ClusterSettings]:
    """Raises if there is a problem, also one that was found before."""
    settings = settings_from(given, problems)
    if problems:
        raise ConfigError(problems, next_step=f"read drumline aws {verb} --help")
    return connect(settings.region, settings.profile), settings


def _from_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        document = parse_toml(read_regular(path, most=TEXT_BYTES, follow_links=True).decode())
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
        return {}
    section = document.get(CLUSTER_SECTION)
    if not isinstance(section, dict):
        problems.append(f"{path}: there is no section [{CLUSTER_SECTION}]")
        return {}
    known = {name.replace("-", "_"): kind for name, (kind, *_) in SETTINGS.items() if name != "config"}
    values = {}
    for name, value in section.items():
        try:
            if name not in known:
                raise Mismatch(f"unknown setting; {did_you_mean(name, known)}")
            values[name] = from_value(known[name], value)
        except Mismatch as mismatch:
            problems.append(f"{path}: {CLUSTER_SECTION}.{name}: {mismatch}")
    return values


def _wrong_settings(settings: ClusterSettings) -> Iterator[str]:
    if not NAME.fullmatch(settings.name):
        yield f"--name: {settings.name!r} is not at most 30 lowercase letters, digits and dashes, a letter first"
    if settings.ssh_from not in (None, ME):
        yield from _wrong_network(settings.ssh_from or "")
    if settings.ssm and settings.ssh_from:
        yield "--ssm and --ssh-from exclude each other: Session Manager needs no open port"


def _wrong_install(settings: ClusterSettings, *, copies_folder: bool) -> Iterator[str]:
    words = settings.requirements
    local = [word for word in words if LOCAL.fullmatch(word)]
    if any(map(CREDENTIALS.search, words)):
        yield "--install: an address has a user, a password or options, which every node would show; give one without"
    elif not words or not all(map(REQUIREMENT.fullmatch, words)):
        yield f"--install: {settings.install!r} is not a list of requirements of pip without markers and quotes"
    elif unpinned := [word for word in words if word not in local and not PINNED.search(word)]:
        yield f"--install: {unpinned[0]!r} is not pinned; write NAME==VERSION, a wheel, or git+URL@ with a whole commit"
    elif local and not copies_folder:
        yield f"--install: {local[0]!r} is of this machine; give the URL at which the nodes find it"
    for path in (Path(word.partition("[")[0]) for word in local if copies_folder):
        if path.is_absolute() or ".." in path.parts or not path.exists():
            yield f"--install: {path} is not in this folder, which is all that the nodes get"


def _wrong_network(text: str) -> Iterator[str]:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        yield f"--ssh-from: {error}; give `me` or a network such as 192.0.2.7/32"
        return
    if network.prefixlen < WIDEST_PREFIX:
        yield f"--ssh-from: {text} is open to (almost) the whole internet; give `me` or a smaller network"
