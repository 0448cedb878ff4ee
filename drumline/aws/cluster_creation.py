"""`up`: create the stack with progress; on failure name the resource and the reason, and leave nothing behind."""

from __future__ import annotations

import time
from typing import Any

from drumline.aws import stack as stacks
from drumline.aws.account import Account, AwsError
from drumline.aws.cluster_plan import MOVING, ClusterPlan
from drumline.aws.teardown import take_down
from drumline.errors import UsageError, as_list

CANCELLED = "Resource creation cancelled"


def bring_up(account: Account, plan: ClusterPlan, progress: stacks.Progress) -> None:
    """Create the cluster, or follow one that is being created. An existing one gets back the nodes that ended."""
    settings = plan.settings
    found = stacks.find_stack(account, settings.stack)
    if found is None:
        stack = str(account.call("cloudformation", "create_stack", **_request(plan))["StackId"])
    elif found["StackStatus"] in ("CREATE_IN_PROGRESS", "CREATE_COMPLETE"):
        _check_same(found, plan)
        stack = str(found["StackId"])
    else:
        raise UsageError(
            f"the cluster {settings.name} is in the state {found['StackStatus']}",
            next_step=f"remove it first: drumline aws down --name {settings.name}",
        )
    _follow(account, stack, plan, progress)
    if found is not None:
        _refill(account, plan)


def _request(plan: ClusterPlan) -> dict[str, Any]:
    tags = {stacks.TAG: plan.settings.name, stacks.PRICE_TAG: "" if plan.node_price is None else f"{plan.node_price:g}"}
    return {
        "StackName": plan.settings.stack,
        "TemplateBody": plan.template(),
        "Parameters": [{"ParameterKey": name, "ParameterValue": value} for name, value in plan.parameters.items()],
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items() if value],
        "Capabilities": ["CAPABILITY_IAM"],
        "OnFailure": "DELETE",
    }


def _check_same(stack: stacks.Stack, plan: ClusterPlan) -> None:
    before = stacks.parameters_of(stack)
    changed = [
        f"{name}: {before[name]} -> {value}"
        for name, value in plan.parameters.items()
        if name not in MOVING and before.get(name, value) != value
    ]
    if changed:
        raise UsageError(
            as_list(f"the cluster {plan.settings.name} exists with other settings:", changed),
            next_step=f"give another --name, or remove it first: drumline aws down --name {plan.settings.name}",
        )


def _follow(account: Account, stack: str, plan: ClusterPlan, progress: stacks.Progress) -> None:
    """Until it is complete. A refused launch of an instance would be retried for ever, so it ends the creation."""
    step = ""
    while True:
        found = stacks.find_stack(account, stack) or {"StackStatus": "DELETE_COMPLETE"}
        if found["StackStatus"] == "CREATE_COMPLETE":
            return
        if found["StackStatus"] != "CREATE_IN_PROGRESS":
            raise _failure(account, stack, progress)
        if refusal := _refused_launch(account, plan.settings.stack):
            take_down(account, plan.settings, progress, delete_data=False)
            raise AwsError(
                f"AWS could not start the instances: {refusal}; all that was made is removed again",
                next_step="give another --zone, --type or --region, fewer --nodes, or leave --placement-group out",
            )
        if (event := stacks.newest_event(account, stack)) != step:
            progress(step := event)
        time.sleep(stacks.POLL_S)


def _refused_launch(account: Account, group: str) -> str:
    """The reason why AWS could not start an instance of the group; empty: it has not refused one."""
    try:
        answer = account.call("autoscaling", "describe_scaling_activities", AutoScalingGroupName=group)
    except AwsError as refused:
        if refused.code == "ValidationError":  # the group does not exist yet
            return ""
        raise
    failed = [one for one in answer["Activities"] if one["StatusCode"] in ("Failed", "Cancelled")]
    return str(failed[-1].get("StatusMessage") or failed[-1]["Description"]) if failed else ""


def _failure(account: Account, stack: str, progress: stacks.Progress) -> AwsError:
    """After the rollback: the first resource that failed, and why."""
    stacks.wait_until_deleted(account, stack, progress)
    events = account.all("cloudformation", "describe_stack_events", "StackEvents", StackName=stack)
    failed = [one for one in reversed(events) if one["ResourceStatus"].endswith("_FAILED")]
    own = [one for one in failed if one.get("ResourceStatusReason") != CANCELLED] or failed
    what = "for an unknown reason"
    if own:
        first, reason = own[0], own[0].get("ResourceStatusReason", "no reason given")
        what = f"at {first['LogicalResourceId']} ({first['ResourceType']}): {reason}"
    return AwsError(
        f"the cluster could not be created, {what}; all that was made is removed again",
        next_step="correct this, and run the same command again",
    )


def _refill(account: Account, plan: ClusterPlan) -> None:
    """Start again what ended when it was idle. After its time limit the group takes no instance any more."""
    name, nodes = plan.settings.stack, plan.settings.nodes
    found = stacks.group_of(account, name)
    if found["MaxSize"] < nodes:
        raise UsageError(
            f"the time of the cluster {plan.settings.name} is over",
            next_step=f"drumline aws down --name {plan.settings.name}, then up again: the volume is kept",
        )
    if found["DesiredCapacity"] < nodes:
        account.call("autoscaling", "set_desired_capacity", AutoScalingGroupName=name, DesiredCapacity=nodes)
