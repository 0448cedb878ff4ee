"""DL134: a container or a job for GPUs that gets none."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import allocated_gpus, header, processes_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL134")
_USES_GPUS = re.compile(r"\bnccl|\bcuda|\bb?fp?16\b|nproc[-_]per[-_]node[= ]gpu", re.IGNORECASE)
_OPTIONS = ("--gpus", "--runtime", "--device", "--privileged", "--hooks-dir", "--env-file")
_MAKE_VISIBLE = ("--nv", "--rocm")
_MAKES_VISIBLE_BY_VARIABLE = re.compile(r"(?:SINGULARITY|APPTAINER)_(?:NV|ROCM)")
# With one of these, the GPUs may come with the node.
_MAY_BRING_GPUS = re.compile(r"gres|gpu|constraint|exclusive|reservation|nodelist|tres")
_ON_CPU = re.compile(r"gloo|--(?:use[-_])?cpu\b", re.IGNORECASE)


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if _is_apptainer_without_gpu(script, launch):
            name = launch.apptainer[0].plain
            message = f"{name} makes no GPU visible to this container"
            yield RULE.at(script, launch.apptainer[0], message, fix=f"write {name} exec --nv")
        elif _is_job_without_gpu(script, launch):
            message = f"{launch.kind} starts several ranks, and the job asks for no GPU"
            fix = "add #SBATCH --gpus-per-node"
            yield RULE.at(script, launch.name[-1], message, fix=fix)
        if not _uses_gpus(script, launch):
            continue
        if launch.docker and _is_docker_without_gpu(launch):
            message = "docker run makes no GPU visible to this container"
            yield RULE.at(script, launch.docker[0], message, fix="add --gpus all")
        elif script.container is not None and script.container.is_without_gpu:
            message = "this container sees no GPU"
            yield RULE.at(script, script.container.name or launch.name[-1], message)


def _is_apptainer_without_gpu(script: Script, launch: Launch) -> bool:
    words = launch.apptainer
    is_known = bool(words) and all(word.head for word in words[:-1])
    is_visible = any(word.head.startswith(_MAKE_VISIBLE) for word in words)
    if not is_known or is_visible or _MAKES_VISIBLE_BY_VARIABLE.search(script.text):
        return False
    return bool(allocated_gpus(launch)) or _uses_gpus(script, launch)


def _is_job_without_gpu(script: Script, launch: Launch) -> bool:
    """Where jobs share nodes: they say how many CPUs or how much memory they need."""
    options = header(launch).by_name
    shares_nodes = {"mem", "mem-per-cpu", "cpus-per-task"} & options.keys()
    if not shares_nodes or options.get("mem") == "0" or launch.kind == PYTHON:
        return False
    # The options may be those of sbatch's command line, in a comment.
    if any(map(_MAY_BRING_GPUS.search, options)) or re.search(r"--g(?:res|pus)", script.text):
        return False
    return (processes_per_node(launch) or 1) > 1 and not _ON_CPU.search(script.text)


def _uses_gpus(script: Script, launch: Launch) -> bool:
    names = " ".join(
        assignment.name for assignment in script.environment if assignment.name.isupper()
    )
    end = max((word.end for word in launch.arguments), default=launch.name[-1].end)
    words = script.text[launch.name[0].start : end]
    docker = " ".join(script.text[word.start : word.end] for word in launch.docker)
    written = f"{names} {words} {docker}"
    is_made_visible = "NVIDIA_VISIBLE_DEVICES" in written or "gloo" in written
    return bool(_USES_GPUS.search(written)) and not is_made_visible


def _is_docker_without_gpu(launch: Launch) -> bool:
    words = launch.docker
    is_run = words[0].plain in {"docker", "podman"} and any(
        word.plain == "run" for word in words[1:3]
    )
    is_known = all(word.head for word in words[:-1])
    return is_run and is_known and not any(word.head.startswith(_OPTIONS) for word in words)
