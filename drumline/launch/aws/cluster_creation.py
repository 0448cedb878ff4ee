"""`up`: create the stack with progress; on failure name the resource and the reason, and leave
nothing behind."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.base.errors import UsageError, as_list
from drumline.launch.aws import stack as stacks
from drumline.launch.aws.account import Account, AwsError, Described
from drumline.launch.aws.cluster_plan import ClusterPlan
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.install import THIS_INSTALLATION
from drumline.launch.aws.instance_type import Hardware
from drumline.launch.aws.teardown import take_down

TEMPLATE = Path(__file__).with_name("cluster.yaml")
# A line of it in whose place something else goes.
MARK = re.compile(r"^( *)# <(.+)>\n", re.MULTILINE)
# They become part of the user data, which cannot be longer than 16 kB.
NODE_PROGRAMS = (
    TEMPLATE.with_name("idle_shutdown.py"),
    TEMPLATE.with_name("prepare.sh"),
)

# Chosen again at every start; a stack that differs in them alone is the same.
MOVING = ("EndsAt", "ImageId", "Owner", "SshFrom", "VolumeId")
CANCELLED = "Resource creation cancelled"
# In the words of Auto Scaling, which gives no code. A quota of vCPUs is "capacity" for it too.
NO_CAPACITY = re.compile(
    r"sufficient .*capacity|no Spot capacity|InsufficientInstanceCapacity|UnfulfillableCapacity"
)
AGAIN = "correct this, and run the same command again"
# Of a node that could not be prepared: it powers itself off.
ENDED_ITSELF = "Client.InstanceInitiatedShutdown"


class CreationError(AwsError):
    """AWS could not make the cluster."""


class NoCapacityError(CreationError):
    """The zone has no capacity, and nothing of the attempt is left: another zone may be tried."""


def bring_up(account: Account, plan: ClusterPlan, progress: stacks.Progress) -> None:
    """Create the cluster, or follow one that is being created. An existing one gets back the nodes
    that ended."""
    settings = plan.settings
    cluster = stacks.find_cluster(account, settings)
    if cluster is None:
        stack = str(account.call("cloudformation", "create_stack", **_request(plan))["StackId"])
    elif cluster["StackStatus"] in ("CREATE_IN_PROGRESS", "CREATE_COMPLETE"):
        _check_same(cluster, plan)
        stack = str(cluster["StackId"])
    else:
        raise UsageError(
            f"the cluster {settings.name} is in the state {cluster['StackStatus']}",
            next_step=f"remove it first: drumline aws down --name {settings.name}",
        )

    try:
        _follow(account, stack, plan, progress)
    except CreationError as error:
        _remove(account, settings, stack, progress, error.what)
        error.what += "; all that was made is removed again"
        raise
    if cluster is not None:
        _refill(account, plan)


def _request(plan: ClusterPlan) -> dict[str, Any]:
    """The arguments of `create_stack`."""
    tags = {
        stacks.TAG: plan.settings.name,
        stacks.OWNER_TAG: plan.parameters["Owner"],
        **stacks.price_tags(plan.costs),
        **plan.settings.tags,
    }
    return {
        "StackName": plan.settings.stack,
        "TemplateBody": template_text(plan.hardware, plan.settings.tags),
        "Parameters": [
            {"ParameterKey": name, "ParameterValue": value}
            for name, value in plan.parameters.items()
        ],
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items() if value],
        "Capabilities": ["CAPABILITY_IAM"],
        "OnFailure": "DELETE",
    }


def _check_same(stack: Described, plan: ClusterPlan) -> None:
    """Raise if the cluster that exists was made with other settings."""
    before = stacks.parameters_of(stack)
    # By default these are the versions that are installed here, which may have been updated since.
    moving = list(MOVING)
    if plan.settings.install == THIS_INSTALLATION:
        moving.append("Requirements")
    changed = [
        f"{name}: {before[name]} -> {value}"
        for name, value in plan.parameters.items()
        if name not in moving and before.get(name, value) != value
    ]
    tags = stacks.tags_of(stack)
    changed += [
        f"tag {key}: {tags.get(key, 'none')} -> {value}"
        for key, value in plan.settings.tags.items()
        if tags.get(key, "") != value
    ]
    if changed:
        raise UsageError(
            as_list(f"the cluster {plan.settings.name} exists with other settings:", changed),
            next_step=f"give another --name, or remove it first: drumline aws down --name {plan.settings.name}",
        )


def _follow(account: Account, stack: str, plan: ClusterPlan, progress: stacks.Progress) -> None:
    """Until it is complete. AWS replaces a node that could not be prepared; as many as the cluster has
    are no accident. A refused launch would be retried for ever, so it ends the creation too."""
    settings = plan.settings
    reasons: dict[str, str] = {}
    for described in stacks.polls(account, stack, progress):
        status = described["StackStatus"]
        if status == "CREATE_COMPLETE":
            return
        if status != "CREATE_IN_PROGRESS":
            what = f"the cluster could not be created, {_cause_of_failure(account, stack)}"
            raise CreationError(what, next_step=AGAIN)

        ended = {"state-reason-code": ENDED_ITSELF}
        for instance in stacks.instances(account, settings.name, ended):
            node = instance["InstanceId"]
            is_new = instance["LaunchTime"] >= described["CreationTime"]
            if is_new and node not in reasons:
                reasons[node] = _reason_of(account, node)
                progress(f"{reasons[node]}; AWS replaces it")

        if len(reasons) >= max(2, settings.nodes):
            *_, reason = reasons.values()
            what = f"{len(reasons)} nodes could not be prepared, the last one: {reason}"
            raise CreationError(what, next_step=AGAIN)

        if refusal := _refused_launch(account, described):
            error = NoCapacityError if NO_CAPACITY.search(refusal) else CreationError
            raise error(
                f"AWS could not start the instances: {refusal}",
                next_step="give another --zone, --type or --region, fewer --nodes, or leave --placement-group out",
            )


def _reason_of(account: Account, node: str) -> str:
    """Why the node ended itself, as it wrote on its console."""
    try:
        console = account.call("ec2", "get_console_output", InstanceId=node).get("Output", "")
    except AwsError as refused:
        return f"{node}: its console output is unknown: {refused.what}"

    reasons = re.findall(rf"drumline: ({node}: .*)", console)
    return reasons[-1].strip() if reasons else f"{node}: its console output has no reason (yet)"


def _refused_launch(account: Account, stack: Described) -> str:
    """Why AWS could not start an instance of this stack; empty: it has not refused one. An earlier
    stack of the same name had a group of the same name, whose activities AWS may still list."""
    try:
        activities = account.all(
            "autoscaling",
            "describe_scaling_activities",
            "Activities[?StatusCode == 'Failed' || StatusCode == 'Cancelled']",
            AutoScalingGroupName=stack["StackName"],
        )
    except AwsError as refused:
        if refused.code == "ValidationError":  # the group does not exist yet
            return ""
        raise

    for activity in reversed(activities):
        if activity["StartTime"] >= stack["CreationTime"]:
            return str(activity.get("StatusMessage") or activity["Description"])

    return ""


def _cause_of_failure(account: Account, stack: str) -> str:
    """The first resource that failed, and why."""
    not_cancelled = f"ResourceStatusReason != '{CANCELLED}'"
    what = f"StackEvents[?ends_with(ResourceStatus, '_FAILED') && {not_cancelled}]"
    newest_first = account.all("cloudformation", "describe_stack_events", what, StackName=stack)
    if not newest_first:
        return "for an unknown reason"

    cause = newest_first[-1]
    reason = cause.get("ResourceStatusReason", "no reason given")
    return f"at {cause['LogicalResourceId']} ({cause['ResourceType']}): {reason}"


def _remove(
    account: Account,
    settings: ClusterSettings,
    stack: str,
    progress: stacks.Progress,
    what: str,
) -> None:
    """Remove a cluster that could not be made. `what`: why, for the error if something of it is left. A
    rollback that AWS has begun is waited for."""
    newest = stacks.find_stack(account, settings.stack)
    if newest is not None and newest["StackId"] != stack:
        raise AwsError(
            f"{what}; another cluster {settings.name} exists now and is left alone",
            next_step=f"drumline aws status --name {settings.name} shows it",
        )

    try:
        take_down(account, settings, progress, delete_data=False, stack_id=stack)
    except AwsError as refused:
        raise AwsError(
            f"{what}; not all that was made is removed: {refused.what}",
            next_step=f"drumline aws down --name {settings.name} removes it, or names what AWS cannot delete",
        ) from refused


def _refill(account: Account, plan: ClusterPlan) -> None:
    """Start again what ended when it was idle. After its time limit the group takes no instance any
    more."""
    name = plan.settings.stack
    nodes = plan.settings.nodes
    group = stacks.group_of(account, name)
    if group["MaxSize"] < nodes:
        raise UsageError(
            f"the time of the cluster {plan.settings.name} is over",
            next_step=f"drumline aws down --name {plan.settings.name}, then up again: the volume is kept",
        )

    if group["DesiredCapacity"] < nodes:
        account.call(
            "autoscaling",
            "set_desired_capacity",
            AutoScalingGroupName=name,
            DesiredCapacity=nodes,
        )


# The template of the stack


def template_text(hardware: Hardware, user_tags: Mapping[str, str]) -> str:
    """`cluster.yaml` for instances of this type, with the programs of the nodes in it, and what is added to
    its lists."""
    # For what the group starts: of the rest, AWS takes the user's tags from the stack.
    tags = [{"Key": key, "Value": value} for key, value in user_tags.items()]
    lists = {
        "cards": _cards(hardware),
        "disk_tags": tags,
        "instance_tags": [{**tag, "PropagateAtLaunch": True} for tag in tags],
    }
    parts = {path.name: path.read_text(encoding="utf-8") for path in NODE_PROGRAMS}
    for name, entries in lists.items():  # YAML reads JSON
        parts[name] = "".join(f"- {json.dumps(entry)}\n" for entry in entries)

    text = TEMPLATE.read_text(encoding="utf-8")
    return MARK.sub(lambda mark: textwrap.indent(parts[mark[2]], mark[1]), text)


def _cards(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """What is added to the first interface: EFA-only ones as AWS recommends, the second on card 0, if
    that has EFA, and the first on the others."""
    if hardware.num_cards == 1:
        return

    cards = range(1, hardware.num_efas + 1)
    if hardware.num_efas >= hardware.num_cards:
        cards = range(hardware.num_cards)
    for card in cards:
        yield {
            "DeviceIndex": 0 if card else 1,
            "NetworkCardIndex": card,
            "InterfaceType": "efa-only",
            "DeleteOnTermination": True,
            "Groups": [{"Fn::GetAtt": ["Group", "GroupId"]}],
        }
