"""`drumline launch --print skypilot|parallelcluster`: its flags, what they exclude, and the
file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from drumline.base.errors import UsageError
from drumline.base.job_secret import SECRET_ENV
from drumline.base.text import join_names, print_message
from drumline.cli.command_line import check_command, misplaced
from drumline.cli.launch_request import LaunchRequest
from drumline.config import FlagTable, FlagValues
from drumline.launch.aws.cluster_access import own_network
from drumline.launch.aws.cluster_settings import (
    ME,
    SETTINGS,
    ClusterSettings,
    settings_from,
)
from drumline.launch.aws.install import other_packages
from drumline.launch.aws.own_wheels import EXTRAS, build_wheel
from drumline.launch.hosts import least_nodes
from drumline.launch.templates import render

WHEELS = Path("drumline-wheels")
SHARED = "/mnt/shared"
"""The shared volume of a cluster."""
FORMATS = ("skypilot", "parallelcluster")
# The accelerated types with EFA: docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html. No account
# is asked for a file.
EFA_TYPES = re.compile(
    r"(p3dn|p4de?|p5\w*|p6[\w-]*|hpc\w+|trn1n|trn2\w*)\.\w+|trn1\.32xlarge"
    r"|(g4dn|g5|g6|g6e|gr6|g7|g7e)\.(([89]|\d\d)xlarge|metal)"
)
ACCELERATORS = re.compile(r"[A-Za-z][A-Za-z0-9-]*(:[1-9][0-9]*)?")
_OF_BOTH = (
    "config",
    "region",
    "type",
    "spot",
    "max-price",
    "ami",
    "disk",
    "install",
    "idle-minutes",
)
# SkyPilot has its own key, network and volumes; ParallelCluster takes the zone of the subnet.
_ONLY: Mapping[str, tuple[str, ...]] = {
    "skypilot": ("accelerators", "zone"),
    "parallelcluster": ("key", "ssh-from", "subnet", "volume", "efa", "placement-group", "gpus"),
}
OF_FILES: FlagTable = {
    "accelerators": (
        str,
        "NAME:N",
        "SkyPilot: the GPUs of each node, on any cloud, such as A100:8; or give --type.",
    ),
    **{
        name: SETTINGS[name]
        for names in (_OF_BOTH, *_ONLY.values())
        for name in names
        if name in SETTINGS
    },
}


def wrong_for_file(verb_flags: FlagValues) -> Iterator[str]:
    """Every mistake in the flags that can be found without the [aws] of a file."""
    printed = verb_flags.print
    for kind, names in _ONLY.items():
        if kind != printed:
            yield from misplaced(verb_flags, names, f"is not for --print {printed}")
    if isinstance(verb_flags.efa, str):
        yield f"--efa: is on or off for --print {printed}; leave the number out"
    if printed == "skypilot":
        accelerators = verb_flags.accelerators
        if accelerators and not ACCELERATORS.fullmatch(accelerators):
            yield f"--accelerators: {accelerators!r} is not NAME or NAME:N, such as A100:8"
        if accelerators and "type" in verb_flags:
            yield "--accelerators and --type exclude each other: each says which GPUs a node has"


def cloud_file_text(request: LaunchRequest, flags: Sequence[str]) -> str:
    """The same job as YAML for `sky launch` or `pcluster create-cluster`: written, never run. `flags`: those
    that the launcher of each node gets as they are."""
    verb_flags = request.flags
    problems = list[str]()
    settings = settings_from(verb_flags, problems, copies_folder=True)
    is_sky = verb_flags.print == "skypilot"
    if is_sky and not (settings.type or "accelerators" in verb_flags):
        problems.append("--print skypilot needs --accelerators or --type")
    if not is_sky:
        problems += _missing_for_parallelcluster(settings)

    check_command("launch", problems)
    least_nodes(verb_flags.nnodes, settings.nodes, known_from="--nodes")
    if settings.ssh_from == ME and not is_sky:
        settings = replace(settings, ssh_from=own_network())

    program = request.program(("--run", None if is_sky else f"{SHARED}/runs/{request.name}"))
    gpus = ["--gpus", str(verb_flags.gpus)] if "gpus" in verb_flags else []
    words = program.words[1:] if program.is_task else program.words
    has_efa = settings.efa
    if has_efa is None:
        has_efa = bool(EFA_TYPES.fullmatch(settings.type))
    return render(
        f"aws/{verb_flags.print}.yaml.j2",
        name=verb_flags.name or request.name,
        settings=settings,
        command=shlex.join([*flags, *gpus, "--", *words]),
        requirements=shlex.join(_folder_requirements(settings)),
        accelerators=verb_flags.accelerators,
        has_mirror="--checkpoint.mirror" in {word.partition("=")[0] for word in words},
        has_efa=has_efa,
        secret_name=SECRET_ENV,
        shared=SHARED,
    )


def _missing_for_parallelcluster(settings: ClusterSettings) -> Iterator[str]:
    """What its file cannot be without."""
    needed = ("type", "region", "subnet")
    if absent := [f"--{name}" for name in needed if not getattr(settings, name)]:
        yield f"--print parallelcluster needs {join_names(absent)}"
    if settings.ssh_from is None:
        yield "--ssh-from: is missing; ParallelCluster would open ssh of the head node to the whole internet"


def _folder_requirements(settings: ClusterSettings) -> list[str]:
    """What the nodes install, which get this folder: drumline itself is written to it, as a
    wheel."""
    if not settings.copies_drumline:
        return settings.requirements
    wheel = build_wheel()
    path = WHEELS / wheel.name

    try:
        WHEELS.mkdir(exist_ok=True)
        path.write_bytes(wheel.content)
    except OSError as error:
        raise UsageError(
            f"the wheels of this installation could not be written to {WHEELS.absolute()}: {error.strerror}",
            next_step="run the command in a folder that you can write to, which the nodes then get",
        ) from error

    print_message(
        f"wrote this installation to {WHEELS}, from which the nodes install it; keep it here"
    )
    return [f"./{path}[{','.join(EXTRAS)}]", *other_packages(settings.install)]
