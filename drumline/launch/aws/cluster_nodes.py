"""The clusters of a region and their nodes: what `status` shows and `launch` connects to."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from drumline.base.text import duration, file_size, plural
from drumline.launch.aws.account import Account
from drumline.launch.aws.stack import (
    TAG,
    instances,
    is_cluster,
    kept_volumes,
    made_at,
    owner_of,
    parameters_of,
    price_words,
    tags_of,
)
from drumline.launch.templates import render


@dataclass(frozen=True, kw_only=True)
class CloudNode:
    """An instance of a cluster."""

    id: str
    address: str
    """Private: what the other nodes reach it at."""
    public_address: str | None


def nodes_of(account: Account, name: str) -> list[CloudNode]:
    """Those that run, the oldest first: a node that replaced another is never the first, which has
    rank 0."""
    return [
        CloudNode(
            id=instance["InstanceId"],
            address=instance["PrivateIpAddress"],
            public_address=instance.get("PublicIpAddress"),
        )
        for instance in instances(account, name, {"instance-state-name": "pending,running"})
    ]


def status_lines(account: Account) -> Iterator[str]:
    """All clusters of the region, the oldest first, and volumes that are left of others."""
    existing = "Stacks[?StackStatus != 'DELETE_COMPLETE']"
    stacks = account.all("cloudformation", "describe_stacks", existing)
    clusters = sorted(filter(is_cluster, stacks), key=lambda stack: stack["CreationTime"])
    for stack in clusters:
        parameters = parameters_of(stack)
        name = tags_of(stack)[TAG]
        now = datetime.now(UTC)
        age = duration((now - stack["CreationTime"]).total_seconds())
        nodes = nodes_of(account, name)
        yield (
            f"{name}: {stack['StackStatus']}, {len(nodes)} of {parameters.get('NodeCount')} x "
            f"{parameters.get('InstanceType')} ({parameters.get('Market')}) run in {parameters.get('Zone')} "
            f"since {age}; so far {price_words(stack, now)}; ends at {parameters.get('EndsAt')} at the latest"
        )
        yield f"  made by {owner_of(stack)} at {made_at(stack)}"
        for node in nodes:
            yield f"  {node.address}  {node.public_address or '-'}  {node.id}"

    names = {tags_of(stack)[TAG] for stack in clusters}
    for volume in kept_volumes(account):
        if (name := tags_of(volume)[TAG]) not in names:
            size = file_size(volume["SizeInBytes"]["Value"])
            yield f"{name}: only its volume {volume['FileSystemId']} is left ({size})"

    yield f"{plural(len(clusters), 'cluster')} in {account.region}"


def ssh_config(
    account: Account,
    nodes: Sequence[CloudNode],
    *,
    by_ssm: bool,
    profile: str | None,
) -> str:
    """For OpenSSH: a node has its private address as its name here too, and is reached by another
    way."""
    return render(
        "aws/ssh_config.j2",
        nodes=nodes,
        by_ssm=by_ssm,
        region=account.region,
        profile_words=f" --profile {shlex.quote(profile)}" if profile else "",
    )
