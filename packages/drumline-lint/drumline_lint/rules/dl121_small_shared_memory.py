"""DL121: a container with several ranks and the default /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import docker_option, processes_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.manifest import DEFAULT_SHARED_MEMORY, parse_size
from drumline_lint.reading.shell import Script, TextRange

RULE = rule("DL121")
_ENOUGH = 1 << 30
_CPU = re.compile(r"\bgloo\b", re.IGNORECASE)


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if launch.kind == PYTHON or processes_per_node(launch) == 1 or _is_on_cpu(launch):
            continue
        size = _docker_size(launch) if launch.docker else _container_size(launch)
        if size is not None and size < _ENOUGH:
            message = (
                f"the container has {size >> 20} MB of /dev/shm, which NCCL and the workers of every rank's "
                "DataLoader share"
                if size
                else "this /dev/shm is an emptyDir on a disk"
            )
            yield RULE.at(script, _place(launch), message, fix=_fix(launch))


def _is_on_cpu(launch: Launch) -> bool:
    """Small trials, for which the default is enough."""
    container = launch.script.container
    is_without = container is not None and container.is_without_gpu and container.kind != "service"
    return _CPU.search(launch.script.text) is not None or is_without


def _container_size(launch: Launch) -> int | None:
    container = launch.script.container
    return container.shared_memory if container else None


def _docker_size(launch: Launch) -> int | None:
    words = [launch.script.text[word.start : word.end] for word in launch.docker]
    if len(words) < 2 or "run" not in words[:3] or any("/dev/shm" in word for word in words):  # noqa: S108
        return None
    if docker_option(launch, "--ipc") is not None:
        return None
    size = docker_option(launch, "--shm-size")
    # An option in a variable may be this one.
    is_sure = all(word.head for word in launch.docker[1:-1]) or size is not None
    if not is_sure and any("@" in word or "OPT" in word or "ARGS" in word for word in words):
        return None
    return DEFAULT_SHARED_MEMORY if size is None else parse_size(size)


def _place(launch: Launch) -> TextRange:
    if launch.docker:
        return launch.docker[0]
    container = launch.script.container
    return container.name if container and container.name else launch.name[-1]


def _fix(launch: Launch) -> str:
    container = launch.script.container
    if launch.docker:
        return "add --shm-size=16g, or --ipc=host"
    if container is not None and container.kind == "service":
        return "add shm_size: 16gb, or ipc: host"
    return "mount an emptyDir with medium: Memory at /dev/shm"
