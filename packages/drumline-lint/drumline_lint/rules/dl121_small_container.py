"""DL121: a container has too little shared memory, no GPU or no network for its ranks.

Workers of a DataLoader and NCCL share memory by /dev/shm, of which a container has 64 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import docker_option, processes_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.manifest import DEFAULT_SHARED_MEMORY, parse_size
from drumline_lint.reading.rendezvous import least_nodes
from drumline_lint.reading.shell import Container, Script

RULE = rule("DL121")

_ENOUGH = 1 << 30

_USES_GPUS = re.compile(r"\bnccl|\bcuda|\b[bf]p?16\b|nproc[-_]per[-_]node[= ]gpu", re.IGNORECASE)
_UNKNOWN_OPTIONS = re.compile(r"\$\{?\w*(?:@|OPT|ARG|FLAG|EXTRA)", re.IGNORECASE)

# NCCL and Gloo listen on ports of their own: publishing one port is not enough.
_NETWORK = ("--network", "--net", "-P", "--publish-all")


def check_shell(script: Script) -> Iterator[Finding]:
    """Containers of several ranks, by `docker run`, in a Compose file or in a manifest.

    For example:

        docker run --gpus all image torchrun --nproc-per-node=4 train.py
    """
    for launch in launches(script):
        container = launch.script.container
        if "run" in [word.plain for word in launch.docker[:3]]:
            for message, fix in _of_docker(launch):
                yield RULE.at(script, launch.docker[0], message, fix=fix)

        elif container is not None:
            for message, fix in _of_container(launch, container):
                yield RULE.at(script, container.name or launch.name[-1], message, fix=fix)


def _of_docker(launch: Launch) -> Iterator[tuple[str, str]]:
    """What the options of `docker run` lack, each with its fix.

    For example:

        docker run --shm-size=1g image torchrun --nproc-per-node=8 train.py
    """
    options = [word.text for word in launch.docker]
    if any(map(_UNKNOWN_OPTIONS.search, options)):
        return

    is_shared = docker_option(launch, "--ipc") is not None
    if not is_shared and not any("/dev/shm" in option for option in options):  # noqa: S108
        size = docker_option(launch, "--shm-size")
        memory = DEFAULT_SHARED_MEMORY if size is None else parse_size(size)
        yield from _of_memory(launch, memory, "add --shm-size=16g, or --ipc=host")

    nodes = least_nodes(launch) or 1
    if nodes > 1 and not any(option.startswith(_NETWORK) for option in options):
        message = f"{nodes} nodes rendezvous, but this container has a network of its own"
        yield message, "add --network=host"


def _of_container(launch: Launch, container: Container) -> Iterator[tuple[str, str]]:
    """What a container of a Compose file or a manifest lacks, each with its fix.

    For example:

        services:
          train:
            image: train
            command: torchrun --nproc-per-node=8 train.py
    """
    if container.kind == "service":
        yield from _of_memory(launch, container.shared_memory, "add shm_size: 16gb, or ipc: host")
    elif not container.is_without_gpu:
        fix = "mount an emptyDir with medium: Memory at /dev/shm"
        yield from _of_memory(launch, container.shared_memory, fix)

    if container.is_without_gpu and (_uses_gpus(launch) or "com/gpu:" in launch.script.text):
        yield "this container sees no GPU", "ask for GPUs, as other containers of the job do"


def _of_memory(launch: Launch, memory: int | None, fix: str) -> Iterator[tuple[str, str]]:
    """Shared memory that is too small for the workers of several ranks; 0 is a folder on a disk."""
    if memory is None or memory >= _ENOUGH or "gloo" in launch.script.text:
        return
    if launch.kind == PYTHON or processes_per_node(launch) == 1:
        return

    message = (
        f"the container has {memory >> 20} MB of /dev/shm, which NCCL and the workers of every rank's "
        "DataLoader share"
    )
    yield message if memory else "this /dev/shm is an emptyDir on a disk", fix


def _uses_gpus(launch: Launch) -> bool:
    """Whether the words of a command, or its variables, name GPUs.

    For example:

        torchrun --nproc-per-node=gpu train.py --backend nccl
    """
    words = [word.text for word in (*launch.name, *launch.arguments)]
    words += [assignment.name for assignment in launch.script.environment]
    text = " ".join(words)
    if "gloo" in text or "NVIDIA_VISIBLE_DEVICES" in text:
        return False

    return _USES_GPUS.search(text) is not None
