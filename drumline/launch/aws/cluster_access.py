"""A way in for ssh, and ways out to packages and AWS: checked before they cost."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from ipaddress import ip_network

from drumline.base.errors import UsageError
from drumline.base.text import join_names, plural
from drumline.launch.aws.account import Account, AwsError, Described, filters
from drumline.launch.aws.cluster_settings import ME, ClusterSettings
from drumline.launch.aws.instance_type import Hardware

ADDRESS_URL = "https://checkip.amazonaws.com"
EVERYWHERE = "0.0.0.0/0"
# What ssh through Session Manager runs on this machine.
SESSION_PROGRAMS = ("aws", "session-manager-plugin")
SESSION_MANUAL = "docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"


def check_way_in(settings: ClusterSettings, hardware: Hardware, *, is_public: bool) -> None:
    """`drumline aws launch` must be able to connect by ssh."""
    if settings.key is None:
        raise UsageError(
            "no --key is set, and `drumline aws launch` connects by ssh",
            next_step="give --key NAME, an EC2 key pair, with --ssh-from me or --ssm",
        )

    if settings.ssm:
        check_session_manager("--ssm")
        return

    ssh_from = settings.ssh_from
    if ssh_from is None:
        raise UsageError(
            "ssh would be closed: neither --ssh-from nor --ssm is set, so `drumline aws launch` could not connect",
            next_step="give --ssh-from me, or --ssm",
        )

    # From outside, instances without a public address are reached through a VPN, or not at all.
    has_vpn = settings.subnet and ssh_from != ME and not ip_network(ssh_from).is_global
    if not is_public and not has_vpn:
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


def check_way_out(account: Account, subnet: Described, *, is_public: bool) -> None:
    """The nodes install packages and report to AWS; in an existing subnet, its routes decide
    whether they can."""
    target = _default_route(account, subnet)
    if target is None or (target.startswith("igw-") and not is_public):
        way_out = "its route table has no working route for it"
        if target is not None:
            way_out = f"its way out is {target}, which needs public addresses, and these instances get none"
        raise UsageError(
            f"the nodes, which install packages, could not reach the internet in {subnet['SubnetId']}: {way_out}",
            next_step="give a --subnet whose route is a NAT gateway, or no --subnet: up makes a VPC",
        )


def _default_route(account: Account, subnet: Described) -> str | None:
    """Where the subnet sends what is for the internet: `igw-...`, or another gateway; None:
    nowhere."""
    by_subnet = {"association.subnet-id": subnet["SubnetId"]}
    main = {"vpc-id": subnet["VpcId"], "association.main": "true"}
    for table in (by_subnet, main):
        routes = account.all(
            "ec2",
            "describe_route_tables",
            "RouteTables[].Routes[]",
            Filters=filters(table),
        )
        if routes:  # every route table has the route within its VPC
            break

    for route in routes:
        is_default = route.get("DestinationCidrBlock") == EVERYWHERE
        if is_default and route.get("State") != "blackhole":
            return str(route.get("GatewayId") or "another gateway")

    return None


def s3_notes(account: Account, vpc: str) -> Iterator[str]:
    """How the nodes of an existing VPC reach S3."""
    of_s3 = filters({"vpc-id": vpc, "service-name": f"com.amazonaws.{account.region}.s3"})
    with account.optional(f"whether {vpc} has an endpoint for S3"):
        what = "VpcEndpoints[].VpcEndpointId"
        if names := account.all("ec2", "describe_vpc_endpoints", what, Filters=of_s3):
            yield f"{vpc} has an endpoint for S3: {join_names(names)}"
        else:
            yield f"{vpc} has no endpoint for S3: through a NAT gateway, each GB costs money"
