"""DL123: a variable that is for finding a fault, or for one node, is left in a script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.rendezvous import launch_variables, least_nodes, most_nodes, nodes_flag
from drumline_lint.reading.shell import Assignment, Script

RULE = rule("DL123")

_INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}
_TRANSPORTS = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe between the GPUs of a node",
    "NCCL_SHM_DISABLE": "shared memory between the ranks of a node",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE between nodes",
}
_FOR_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING=1": "waits for the GPU after every kernel",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "compares every collective across the ranks before it runs",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1": "asks the driver for every tensor's memory",
    "NCCL_DEBUG=TRACE": "logs more than any other level",
}
_ASSIGNMENT_LINE = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=[^#]*$")
_LONGEST_COMMENT = 1000
_NAMED_FOR_DEBUGGING = re.compile(
    r"(?:^|[^a-z])(?:debug|profil|trace|repro|hang|test)", re.IGNORECASE
)


def check_shell(script: Script) -> Iterator[Finding]:
    """Variables that make a run slow or verbose, or that name the loopback interface.

    For example:

        export CUDA_LAUNCH_BLOCKING=1
        torchrun --nproc-per-node=4 train.py
    """
    is_image = script.container is not None and script.container.kind == "image"
    if not is_image and not launches(script):
        return

    for item in launch_variables(script):
        value = (item.constant or "").upper()
        setting = f"{item.name}={value}"

        if _is_loopback(item.name, value) and _may_have_nodes(script):
            message = f"{item.name}={item.constant} is the loopback interface, which no other node can reach"
            fix = "name the interface that connects the nodes, or leave the variable out"
            yield RULE.at(script, item, message, fix=fix, severity=Severity.WARNING)

        elif item.is_conditional or _has_comment(item):
            continue

        elif item.name in _TRANSPORTS and value in {"1", "TRUE", "YES"}:
            message = f"{item.name}=1 switches off {_TRANSPORTS[item.name]}"
            if item.name != "NCCL_IB_DISABLE" or not _is_on_one_node(script):
                yield RULE.at(script, item, message)

        elif setting in _FOR_DEBUGGING and not _is_for_debugging(script):
            message = f"{setting} {_FOR_DEBUGGING[setting]}"
            yield RULE.at(script, item, message)


def _is_loopback(name: str, value: str) -> bool:
    """`NCCL_SOCKET_IFNAME=lo`"""
    interfaces = set(value.removeprefix("=").split(","))
    return name in _INTERFACES and interfaces <= {"LO", "LO0"}


def _may_have_nodes(script: Script) -> bool:
    """Whether a launch is for several nodes, or for as many as its caller says.

    For example:

        torchrun --nnodes=$NODES train.py
    """
    if (script.sbatch.number("nodes") or 1) > 1:
        return True

    for launch in launches(script):
        if "hostfile" in launch.flags:
            return True

        nodes = launch.flags.get(nodes_flag(launch))
        if nodes is None or least_nodes(launch) == 1:
            continue

        is_one_by_default = nodes.value is not None and nodes.value.text.endswith("-1}")
        if not is_one_by_default:
            return True
    return False


def _is_on_one_node(script: Script) -> bool:
    return all(launch.is_torchrun and most_nodes(launch) == 1 for launch in launches(script))


def _is_for_debugging(script: Script) -> bool:
    """Whether its name, or that of its job, says so: `debug_ddp.sh`."""
    if "HCCL_" in script.text or "ASCEND_" in script.text:
        return True  # for NPUs

    job = script.sbatch.by_name.get("job-name") or ""
    return _NAMED_FOR_DEBUGGING.search(f"{script.path.stem} {job}") is not None


def _has_comment(item: Assignment) -> bool:
    """Behind it, or above the assignments that it is one of: who writes one has a reason.

    For example:

        # the switch has no multicast
        export NCCL_DEBUG=TRACE
        export NCCL_IB_DISABLE=1
    """
    text = item.script.text
    if " #" in text[item.end :].partition("\n")[0]:
        return True

    start = text.rfind("\n", 0, item.start) + 1
    above = text[max(0, start - _LONGEST_COMMENT) : start].splitlines()
    while above and _ASSIGNMENT_LINE.match(above[-1]):
        above.pop()
    return bool(above) and re.match(r"\s*#(?!!|SBATCH)", above[-1]) is not None
