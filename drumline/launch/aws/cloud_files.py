"""The same job as a file for SkyPilot or AWS ParallelCluster: written, never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from drumline.base.job_secret import SECRET_ENV
from drumline.base.text import join_names
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.templates import render

SHARED = "/mnt/shared"
# The accelerated types with EFA: docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html. No account
# is asked for a file.
EFA_TYPES = re.compile(
    r"(p3dn|p4de?|p5\w*|p6[\w-]*|hpc\w+|trn1n|trn2\w*)\.\w+|trn1\.32xlarge"
    r"|(g4dn|g5|g6|g6e|gr6|g7|g7e)\.(([89]|\d\d)xlarge|metal)"
)


def cloud_file_text(
    kind: str,
    *,
    name: str,
    settings: ClusterSettings,
    command: Sequence[str],
    requirements: Sequence[str],
    accelerators: str | None,
) -> str:
    """The YAML that `sky launch` or `pcluster create-cluster` takes. `command`: of `drumline launch`,
    flags and all; `requirements`: what pip installs on the nodes, in this folder; `accelerators`:
    SkyPilot's own words for GPUs, such as `A100:8`."""
    has_efa = settings.efa
    if has_efa is None:
        has_efa = bool(EFA_TYPES.fullmatch(settings.type))
    return render(
        f"aws/{kind}.yaml.j2",
        name=name,
        settings=settings,
        command=shlex.join(command),
        requirements=shlex.join(requirements),
        accelerators=accelerators,
        has_mirror="--checkpoint.mirror" in {word.partition("=")[0] for word in command},
        has_efa=has_efa,
        secret_name=SECRET_ENV,
        shared=SHARED,
    )


def missing_for_parallelcluster(settings: ClusterSettings) -> list[str]:
    """What its file cannot be without, as messages."""
    needed = ("type", "region", "subnet")
    absent = [f"--{name}" for name in needed if not getattr(settings, name)]
    problems = [f"--print parallelcluster needs {join_names(absent)}"] if absent else []
    if settings.ssh_from is None:
        problems.append(
            "--ssh-from: is missing; ParallelCluster would open ssh of the head node to the whole internet"
        )

    return problems
