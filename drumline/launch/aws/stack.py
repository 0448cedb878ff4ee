"""A cluster as AWS has it: its CloudFormation stack, its nodes, what `status` shows of it and how `launch` connects
to it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from drumline.base.errors import UsageError
from drumline.base.text import duration, file_size, plural
from drumline.launch.aws.account import Account, AwsError, Described, filters
from drumline.launch.aws.cluster_settings import STACK_PREFIX, ClusterSettings
from drumline.launch.aws.prices import UNKNOWN, Cost, dollars
from drumline.launch.templates import render

TAG = "drumline:cluster"
OWNER_TAG = "drumline:owner"
NODES_PRICE_TAG = "drumline:nodes-usd-per-hour"
STACK_PRICE_TAG = "drumline:stack-usd-per-hour"
HOUR = timedelta(hours=1)
POLL_S = 5.0
Progress = Callable[[str], None]


def find_stack(account: Account, stack: str) -> Described | None:
    """By its name, or by its id after it was deleted."""
    try:
        return dict(account.call("cloudformation", "describe_stacks", StackName=stack)["Stacks"][0])
    except AwsError as refused:
        if refused.code == "ValidationError":  # AWS's code for a stack that does not exist
            return None
        raise


def find_cluster(
    account: Account, settings: ClusterSettings, stack_id: str = ""
) -> Described | None:
    """The stack of the cluster, or of an earlier one of its name; a stack of that name that drumline
    did not make is refused."""
    stack = find_stack(account, stack_id or settings.stack)
    if stack is None or is_cluster(stack):
        return stack

    raise UsageError(
        f"the stack {settings.stack} in {account.region}, made {made_at(stack)}, is not a cluster of drumline: it has "
        f"no tag {TAG}={settings.name}; it was left alone",
        next_step="give another --name; if the stack is yours, delete it with the program that made it",
    )


def is_cluster(stack: Described) -> bool:
    """Whether drumline made it: it has our tag, with the name that it has itself."""
    name = tags_of(stack).get(TAG)
    return name is not None and bool(stack["StackName"] == f"{STACK_PREFIX}{name}")


def owner_of(described: Described) -> str:
    """Who made a stack or a volume."""
    return tags_of(described).get(OWNER_TAG, "an unknown identity")


def made_at(described: Described) -> str:
    """When a stack or a volume was made."""
    return f"{described['CreationTime'].astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def tags_of(described: Described) -> dict[str, str]:
    """The tags of whatever AWS has described."""
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}


def parameters_of(stack: Described) -> dict[str, str]:
    """What the stack was made with."""
    return {
        parameter["ParameterKey"]: parameter["ParameterValue"]
        for parameter in stack.get("Parameters", ())
    }


def instances(account: Account, name: str, values: Mapping[str, str]) -> list[Described]:
    """Those of this cluster with these values, the oldest first."""
    tagged = filters({f"tag:{TAG}": name, **values})
    items = account.all("ec2", "describe_instances", "Reservations[].Instances[]", Filters=tagged)
    return sorted(items, key=lambda item: (item["LaunchTime"], item["InstanceId"]))


def kept_volumes(account: Account, name: str | None = None) -> list[Described]:
    """Volumes that clusters (or this one) have made, but for those that are being deleted."""
    tag = f"Key == '{TAG}'" if name is None else f"Key == '{TAG}' && Value == '{name}'"
    what = f"FileSystems[?LifeCycleState != 'deleting' && Tags[?{tag}]]"
    return account.all("efs", "describe_file_systems", what)


def group_of(account: Account, stack: str) -> Described:
    """Its Auto Scaling group, which has the same name."""
    answer = account.call(
        "autoscaling",
        "describe_auto_scaling_groups",
        AutoScalingGroupNames=[stack],
    )
    return dict(answer["AutoScalingGroups"][0])


def polls(account: Account, stack: str, progress: Progress) -> Iterator[Described]:
    """The stack, again and again; its newest event is reported meanwhile."""
    step = ""
    while True:
        yield find_stack(account, stack) or {"StackStatus": "DELETE_COMPLETE"}
        answer = account.call("cloudformation", "describe_stack_events", StackName=stack)
        event = "waiting for AWS"
        for newest in answer["StackEvents"][:1]:
            event = f"{newest['LogicalResourceId']}: {newest['ResourceStatus']}"

        if event != step:
            progress(event)
        step = event
        time.sleep(POLL_S)


def price_tags(costs: Sequence[Cost]) -> dict[str, str]:
    """What `status` needs: the most that an hour may cost; no tag where that is unknown."""
    totals = {NODES_PRICE_TAG: 0.0, STACK_PRICE_TAG: 0.0}
    for cost in costs:
        tag = NODES_PRICE_TAG if cost.ends_with_nodes else STACK_PRICE_TAG
        totals[tag] += cost.most_an_hour
    return {tag: f"{amount:.6f}" for tag, amount in totals.items() if amount < UNKNOWN}


def price_words(stack: Described, now: datetime) -> str:
    """What the cluster has cost at most since it was made: its nodes until their end, and the rest
    until now."""
    tags = tags_of(stack)
    if NODES_PRICE_TAG not in tags or STACK_PRICE_TAG not in tags:
        return "at an unknown price (a part has no listed price, or is a spot instance without --max-price)"

    made = stack["CreationTime"]
    nodes_until = min(now, datetime.fromisoformat(parameters_of(stack)["EndsAt"]))
    nodes_price = float(tags[NODES_PRICE_TAG]) * ((nodes_until - made) / HOUR)
    stack_price = float(tags[STACK_PRICE_TAG]) * ((now - made) / HOUR)
    return f"at most {dollars(nodes_price + stack_price)}, beside EFS and traffic"


# Its nodes


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
