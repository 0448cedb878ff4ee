"""The same job as a file for SkyPilot or AWS ParallelCluster: written, never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drumline.base.job_secret import SECRET_ENV
from drumline.base.text import join_names
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.kubernetes import to_yaml

SHARED = "/mnt/shared"
QUEUE = "train"
# Small, and x86_64 like most types with GPUs.
HEAD_NODE = "t3.large"
# The accelerated types with EFA: docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html. No account
# is asked for a file.
EFA_TYPES = re.compile(
    r"(p3dn|p4de?|p5\w*|p6[\w-]*|hpc\w+|trn1n|trn2\w*)\.\w+|trn1\.32xlarge"
    r"|(g4dn|g5|g6|g6e|gr6|g7|g7e)\.(([89]|\d\d)xlarge|metal)"
)
RUN = """\
# SkyPilot sets these variables on each node; the first address is that of node 0.
master=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
exec drumline launch --nodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --master "$master" {command}
"""


@dataclass(frozen=True, kw_only=True)
class CloudFile:
    name: str
    settings: ClusterSettings
    flags: Sequence[str]
    """Of `drumline launch`."""
    words: Sequence[str]
    """The task or script, and its arguments."""
    requirements: Sequence[str]
    """What pip installs on the nodes, in this folder."""
    accelerators: str | None = None
    """SkyPilot's own words for GPUs, such as `A100:8`; None: those of the instance type."""


def skypilot_text(file: CloudFile) -> str:
    settings = file.settings
    is_multi = settings.nodes > 1
    document = {
        "name": file.name,
        "num_nodes": settings.nodes,
        "workdir": ".",
        "resources": _skypilot_resources(settings, file.accelerators),
        # Without a value: `sky launch` asks for it.
        **({"secrets": {SECRET_ENV: None}} if is_multi else {}),
        "setup": f"pip install --quiet {shlex.join(file.requirements)}\n",
        "run": RUN.format(command=shlex.join([*file.flags, "--", *file.words])),
    }
    start = "sky jobs launch" if settings.spot else f"sky launch --cluster {file.name}"
    secret = f' --secret {SECRET_ENV}="$(openssl rand -hex 32)"' if is_multi else ""
    comments = [
        "Written by drumline launch --print skypilot. Start it with:",
        f"  {start}{secret} FILE",
    ]
    if "--checkpoint.mirror" not in {word.partition("=")[0] for word in file.words}:
        comments.append(
            "The disks are lost with the nodes: --checkpoint.mirror keeps checkpoints in a bucket."
        )
    return to_yaml([document], comments=comments)


def _skypilot_resources(settings: ClusterSettings, accelerators: str | None) -> dict[str, Any]:
    autostop = {"idle_minutes": settings.idle_minutes, "down": True}
    resources = {
        "infra": _skypilot_place(settings),
        "instance_type": settings.type or None,
        "accelerators": accelerators,
        "use_spot": settings.spot,
        "max_hourly_cost": settings.max_price,
        "disk_size": settings.disk,
        "image_id": settings.ami,
        "autostop": autostop if settings.idle_minutes else None,
    }
    return {name: value for name, value in resources.items() if value is not None}


def _skypilot_place(settings: ClusterSettings) -> str | None:
    """None: any cloud. Only AWS has these instance types, regions and images."""
    if settings.zone:
        return f"aws/{settings.region or '*'}/{settings.zone}"
    if settings.region:
        return f"aws/{settings.region}"
    return "aws" if settings.type or settings.ami else None


def parallelcluster_text(file: CloudFile) -> str:
    settings = file.settings
    has_efa = settings.efa
    if has_efa is None:
        has_efa = bool(EFA_TYPES.fullmatch(settings.type))
    document = _parallelcluster_document(settings, has_efa=has_efa)
    return to_yaml([document], comments=_parallelcluster_comments(file, has_efa=has_efa))


def _parallelcluster_document(settings: ClusterSettings, *, has_efa: bool) -> dict[str, Any]:
    nodes = {
        "Name": "nodes",
        "Instances": [{"InstanceType": settings.type}],
        "MinCount": 0,
        "MaxCount": settings.nodes,
        **({"Efa": {"Enabled": True}} if has_efa else {}),
        **({"SpotPrice": settings.max_price} if settings.spot and settings.max_price else {}),
    }
    queue = {
        "Name": QUEUE,
        "CapacityType": "SPOT" if settings.spot else "ONDEMAND",
        "JobExclusiveAllocation": True,
        "Networking": {
            "SubnetIds": [settings.subnet],
            "PlacementGroup": {"Enabled": settings.placement_group},
        },
        "ComputeSettings": {
            "LocalStorage": {"RootVolume": {"Size": settings.disk, "Encrypted": True}}
        },
        "ComputeResources": [nodes],
    }
    new_volume = {"Encrypted": True, "DeletionPolicy": "Retain"}
    volume = {"FileSystemId": settings.volume} if settings.volume else new_volume
    image = {"CustomAmi": settings.ami} if settings.ami else {}
    return {
        "Region": settings.region,
        "Image": {"Os": "ubuntu2404", **image},
        "Imds": {"ImdsSupport": "v2.0"},
        "HeadNode": {
            "InstanceType": HEAD_NODE,
            "Networking": {"SubnetId": settings.subnet},
            "Ssh": {
                **({"KeyName": settings.key} if settings.key else {}),
                "AllowedIps": settings.ssh_from,
            },
            "LocalStorage": {"RootVolume": {"Encrypted": True}},
        },
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {"ScaledownIdletime": settings.idle_minutes or -1},
            "SlurmQueues": [queue],
        },
        "SharedStorage": [
            {"Name": "shared", "MountDir": SHARED, "StorageType": "Efs", "EfsSettings": volume}
        ],
    }


def _parallelcluster_comments(file: CloudFile, *, has_efa: bool) -> list[str]:
    """How to start the cluster, the job on it, and how to end it."""
    python = f"{SHARED}/drumline/bin"
    submit = ["--slurm", "--partition", QUEUE, "--nodes", str(file.settings.nodes)]
    cluster = f"--cluster-name {file.name}"
    return [
        f"Written by drumline launch --print parallelcluster. The head node is a {HEAD_NODE} (x86_64). Start it with:",
        f"  pcluster create-cluster {cluster} --cluster-configuration FILE",
        *([] if has_efa else ["EFA is off: if the type has it, write the file again with --efa."]),
        f"Then on the head node (pcluster ssh {cluster}), in a folder with the code below {SHARED}:",
        f"  python3 -m venv {SHARED}/drumline",
        f"  {python}/pip install {shlex.join(file.requirements)}",
        f"  {python}/drumline launch {shlex.join([*submit, *file.flags, '--', *file.words])}",
        f"The end (the volume is kept): pcluster delete-cluster {cluster}",
    ]


def missing_for_parallelcluster(settings: ClusterSettings) -> list[str]:
    """What its file cannot be without, as messages."""
    needed = {"type": settings.type, "region": settings.region, "subnet": settings.subnet}
    absent = [f"--{name}" for name, value in needed.items() if not value]
    problems = [f"--print parallelcluster needs {join_names(absent)}"] if absent else []
    if settings.ssh_from is None:
        problems.append(
            "--ssh-from: is missing; ParallelCluster would open ssh of the head node to the whole internet"
        )
    return problems
