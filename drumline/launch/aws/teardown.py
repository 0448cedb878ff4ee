"""`down`: remove what `up` made, keep a volume with its data unless asked, and prove that nothing
billable is left."""

from __future__ import annotations

import time
from collections.abc import Iterator

from drumline.base.errors import as_list
from drumline.base.text import file_size
from drumline.launch.aws import stack as stacks
from drumline.launch.aws.account import Account, AwsError, Described, filters
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.prices import UNKNOWN, dollars, listed_price
from drumline.launch.aws.stack import TAG, kept_volumes

_DELETE_ATTEMPTS = 2
_LAST_CHECKS = 12


# By kind: how EC2 lists those with a tag, and where an answer has the id and the state.
_BILLED_KINDS = {
    "instance": ("describe_instances", "Reservations[].Instances[].[InstanceId, State.Name]"),
    "disk": ("describe_volumes", "Volumes[].[VolumeId, State]"),
    "address": ("describe_addresses", "Addresses[].[AllocationId, '']"),
    "NAT gateway": ("describe_nat_gateways", "NatGateways[].[NatGatewayId, State]"),
}
_FREE_STATES = ("terminated", "shutting-down", "deleting", "deleted", "failed")


def take_down(
    account: Account,
    settings: ClusterSettings,
    progress: stacks.Progress,
    *,
    delete_data: bool,
    stack_id: str = "",
) -> list[Described]:
    """The volumes that are kept. The same again, or after an `up` that was killed, does what is left to do.
    `stack_id`: only this stack, whichever has its name now."""
    stack = stacks.find_cluster(account, settings, stack_id) or {}
    status = stack.get("StackStatus", "DELETE_COMPLETE")
    if status != "DELETE_COMPLETE":
        _delete_stack(account, str(stack["StackId"]), progress)

    for volume in kept_volumes(account, settings.name):
        # One that was made for a stack that was still being created has no data.
        never_came_up = status == "CREATE_IN_PROGRESS" and (
            volume["CreationTime"] >= stack["CreationTime"]
        )
        if delete_data or never_came_up:
            _delete_volume(account, str(volume["FileSystemId"]), progress)

    _wait_for_rest(account, settings.name, progress)
    return kept_volumes(account, settings.name)


def made_by_others(account: Account, settings: ClusterSettings, *, delete_data: bool) -> list[str]:
    """What `down` would remove and another identity made, with who and when."""
    stack = stacks.find_cluster(account, settings)
    removed = {} if stack is None else {f"the cluster {settings.name}": stack}
    if delete_data:
        for volume in kept_volumes(account, settings.name):
            removed[f"the volume {volume['FileSystemId']}, with its data,"] = volume

    identity = account.identity()
    return [
        f"{what} was made by {stacks.owner_of(described)} at {stacks.made_at(described)}, and you are {identity}"
        for what, described in removed.items()
        if stacks.owner_of(described) != identity
    ]


def _wait_for_rest(account: Account, name: str, progress: stacks.Progress) -> None:
    """Until only volumes are left. A disk ends a moment after its instance."""
    for _ in range(_LAST_CHECKS):
        named = ", ".join(_billed(account, name))
        if not named:
            return

        progress(f"waiting for {named}")
        time.sleep(stacks.POLL_S)

    raise AwsError(
        f"still on the bill of {name}: {named}",
        next_step="run down again in a minute; if they stay, delete them in the EC2 console",
    )


def _delete_stack(account: Account, stack: str, progress: stacks.Progress) -> None:
    """Twice if need be: interfaces of instances that have just ended may still block a security
    group. An AwsError names each resource that AWS cannot delete."""
    for _ in range(_DELETE_ATTEMPTS):
        account.call("cloudformation", "delete_stack", StackName=stack)
        for described in stacks.polls(account, stack, progress):
            if described["StackStatus"] == "DELETE_COMPLETE":
                return
            if described["StackStatus"] == "DELETE_FAILED":
                break

    resources = account.all(
        "cloudformation",
        "list_stack_resources",
        "StackResourceSummaries[?ResourceStatus == 'DELETE_FAILED']",
        StackName=stack,
    )
    left = [
        f"{resource['LogicalResourceId']} ({resource.get('PhysicalResourceId')}): "
        f"{resource.get('ResourceStatusReason')}"
        for resource in resources
    ]
    raise AwsError(
        as_list("AWS could not delete:", left),
        next_step="remove what of yours uses it, such as an interface in its security group; then run down again",
    )


def _delete_volume(account: Account, volume: str, progress: stacks.Progress) -> None:
    """With its data. AWS first deletes its mount targets, which takes a while."""
    while targets := account.all(
        "efs", "describe_mount_targets", "MountTargets", FileSystemId=volume
    ):
        for target in targets:
            if target["LifeCycleState"] not in ("creating", "deleting", "deleted"):
                name = target["MountTargetId"]
                account.call("efs", "delete_mount_target", MountTargetId=name)
        progress(f"waiting for the mount targets of {volume}")
        time.sleep(stacks.POLL_S)

    account.call("efs", "delete_file_system", FileSystemId=volume)


def _billed(account: Account, name: str) -> Iterator[str]:
    """What has the cluster's tag and costs money, beside volumes, asked from EC2 itself."""
    tagged = filters({f"tag:{TAG}": name})
    for kind, (operation, what) in _BILLED_KINDS.items():
        for resource, state in account.all("ec2", operation, what, Filters=tagged):
            if state not in _FREE_STATES:
                yield f"{kind} {resource}"


def kept_lines(
    account: Account, settings: ClusterSettings, volumes: list[Described]
) -> Iterator[str]:
    """What `down` has kept, and that nothing else is left."""
    for volume in volumes:
        size = "size not counted yet"
        if num_bytes := volume["SizeInBytes"]["Value"]:
            size = f"{file_size(num_bytes)}, as EFS last counted"

        month = listed_price(account, "volume")
        cost = f"which costs {dollars(month)} for a GB a month"
        if month == UNKNOWN:
            cost = "whose price is unknown"

        yield f"kept the volume {volume['FileSystemId']} ({size}), {cost}; up uses it again"
        yield f"delete it with its data: drumline aws down --name {settings.name} --delete-data"

    kinds = "no instance, disk, address or NAT gateway"
    yield f"nothing else of {settings.name} is on the bill: {kinds} has its tag in {account.region}"
