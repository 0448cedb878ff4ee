"""The same job as a file for SkyPilot or AWS ParallelCluster: written, never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.base.job_secret import SECRET_ENV
from drumline.base.text import join_names
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.templates import render

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


@dataclass(frozen=True, kw_only=True)
class CloudFile:
    """What a file for another tool is made from."""

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
    """The YAML that `sky launch` takes."""
    settings = file.settings
    resources = {
        "infra": _skypilot_place(settings),
        "instance_type": settings.type or None,
        "accelerators": file.accelerators,
        "use_spot": settings.spot,
        "max_hourly_cost": settings.max_price,
        "disk_size": settings.disk,
        "image_id": settings.ami,
    }
    return render(
        "aws/skypilot.yaml.j2",
        file=file,
        settings=settings,
        resources=resources,
        has_mirror="--checkpoint.mirror" in {word.partition("=")[0] for word in file.words},
        requirements=shlex.join(file.requirements),
        command=shlex.join([*file.flags, "--", *file.words]),
        secret_name=SECRET_ENV,
    )


def _skypilot_place(settings: ClusterSettings) -> str | None:
    """None: any cloud. Only AWS has these instance types, regions and images."""
    if settings.zone:
        return f"aws/{settings.region or '*'}/{settings.zone}"
    if settings.region:
        return f"aws/{settings.region}"
    return "aws" if settings.type or settings.ami else None


def parallelcluster_text(file: CloudFile) -> str:
    """The YAML that `pcluster create-cluster` takes."""
    settings = file.settings
    has_efa = settings.efa
    if has_efa is None:
        has_efa = bool(EFA_TYPES.fullmatch(settings.type))
    submit = ["--slurm", "--partition", QUEUE, "--nodes", str(settings.nodes)]
    return render(
        "aws/parallelcluster.yaml.j2",
        file=file,
        settings=settings,
        has_efa=has_efa,
        head_node=HEAD_NODE,
        queue=QUEUE,
        shared=SHARED,
        requirements=shlex.join(file.requirements),
        command=shlex.join([*submit, *file.flags, "--", *file.words]),
    )


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
