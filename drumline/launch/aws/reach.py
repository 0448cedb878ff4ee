"""Whether a planned cluster can work: a way in for ssh, and a way out to packages and AWS. Checked
before it costs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

from drumline.base.errors import UsageError
from drumline.base.text import join_names, plural
from drumline.launch.aws.account import Account
from drumline.launch.aws.cluster_settings import ME, ClusterSettings
from drumline.launch.aws.offers import Hardware

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
        where = (
            settings.subnet or f"a new VPC, with {plural(hardware.num_cards, 'network card')} each"
        )
        raise UsageError(
            f"the instances get no public address in {where}, so --ssh-from {ssh_from} cannot reach them",
            next_step="give --ssm in place of --ssh-from, or a --subnet and the network of your VPN; or --no-efa",
        )


def check_session_manager(why: str) -> None:
    missing = [program for program in SESSION_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise UsageError(
            f"{why} needs {join_names(missing)} on this machine, on the PATH",
            next_step=f"install it: {SESSION_MANUAL}; or make the cluster with --ssh-from me",
        )


def check_way_out(
    account: Account, settings: ClusterSettings, subnet: Mapping[str, Any], *, is_public: bool
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


def _default_route(account: Account, subnet: Mapping[str, Any]) -> str | None:
    """Where the subnet sends what is for the internet: `igw-...`, or another gateway; None:
    nowhere."""
    by_subnet = [{"Name": "association.subnet-id", "Values": [subnet["SubnetId"]]}]
    main = [
        {"Name": "vpc-id", "Values": [subnet["VpcId"]]},
        {"Name": "association.main", "Values": ["true"]},
    ]
    tables = account.all("ec2", "describe_route_tables", "RouteTables", Filters=by_subnet)
    tables = tables or account.all("ec2", "describe_route_tables", "RouteTables", Filters=main)
    for route in tables[0]["Routes"] if tables else ():
        if route.get("DestinationCidrBlock") == EVERYWHERE and route.get("State") != "blackhole":
            return str(route.get("GatewayId") or "another gateway")
    return None
