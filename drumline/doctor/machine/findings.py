"""What is wrong with one machine, from its facts: each thing in a sentence with what to type. Nothing is asked here,
so a host far away is judged by the same words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.doctor.machine.folder_findings import folder_findings
from drumline.doctor.machine.gpu_findings import gpu_findings
from drumline.doctor.machine.network_findings import network_findings
from drumline.doctor.machine.variable_findings import variable_findings
from drumline.text import GIB, MIB, memory_size

SHM = "/dev/shm"  # noqa: S108 - talked about, not written to
# Docker's default of 64 MiB holds not even one batch of 256 images (147 MiB), and NCCL puts about 10 MiB there for each
# pair of GPUs: with GPUs it ends in a bus error. A small job on CPUs gets by with that, but not with half of it.
SHM_WITH_GPUS = 128 * MIB
SHM_WITHOUT = 32 * MIB
# Four workers with two batches each.
SHM_COMFORTABLE = GIB
FEWEST_FILES = 256
COMMON_FILES = 1024
LEAST_MEMORY = GIB


def machine_findings(facts: Mapping[str, Any], *, many_hosts: bool = False) -> list[Finding]:
    """Of one host. `many_hosts`: the job has others too, so what leads nowhere but here is a problem."""
    return [
        *gpu_findings(facts),
        *_shared_memory(facts),
        *_open_files(facts),
        *_memory(facts),
        *folder_findings(facts),
        *network_findings(facts, many_hosts=many_hosts),
        *_processors(facts),
        *_clock(facts),
        *variable_findings(facts),
    ]


def _shared_memory(facts: Mapping[str, Any]) -> Iterator[Finding]:
    shm = facts["shm"]
    fix = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
    fix += "on a machine of your own: mount -o remount,size=8G /dev/shm"
    check = "shared memory"
    if shm is None:
        yield Finding(
            level="problem",
            check=check,
            where=facts["host"],
            what="there is no /dev/shm, through which loader workers and NCCL hand over their tensors",
            fix=fix,
        )
        return
    least = shm["need_bytes"] or (SHM_WITH_GPUS if facts["gpus"] else SHM_WITHOUT)
    free, size = shm["free_bytes"], shm["bytes"]
    if free >= max(least, SHM_COMFORTABLE):
        return
    level: Level = "problem" if free < least else "warning"
    end = (
        f"less than the {memory_size(least)} that this job needs"
        if level == "problem"
        else "enough for small batches only"
    )
    what = (
        f"{SHM} has {memory_size(free)} free of {memory_size(size)}, {end}: loader workers and NCCL die there "
        "with a bus error"
    )
    if size > 2 * max(free, least):
        fix = "see what is left there by dead processes: ls -l /dev/shm"
    yield Finding(level=level, check=check, where=facts["host"], what=what, fix=fix)


def _open_files(facts: Mapping[str, Any]) -> Iterator[Finding]:
    soft, hard = facts["open_files"]["soft"], facts["open_files"]["hard"]
    if soft is None or soft > COMMON_FILES:
        return
    may_raise = hard is None or hard > COMMON_FILES
    yield Finding(
        level="problem" if soft < FEWEST_FILES else "warning",
        check="open files",
        where=facts["host"],
        what=f"a process may have {soft} files open; loader workers and connections to other ranks use them up "
        "('Too many open files', 'received 0 items of ancdata')",
        fix=f"ulimit -n {min(hard or 65536, 65536)}"
        if may_raise
        else "docker run --ulimit nofile=65536, or raise nofile in /etc/security/limits.conf",
    )


def _memory(facts: Mapping[str, Any]) -> Iterator[Finding]:
    memory = facts["memory"]
    limit = memory["limit_bytes"]
    free = min(n for n in (memory["available_bytes"], limit, memory["bytes"]) if n is not None)
    if free < LEAST_MEMORY:
        of = f"a container's limit of {memory_size(limit)}" if limit else memory_size(memory["bytes"])
        yield Finding(
            level="warning",
            check="memory",
            where=facts["host"],
            what=f"{memory_size(free)} of memory are free, of {of}: a rank with loader workers needs more",
            fix="end what else runs here, or give the container more (docker run --memory)",
        )


def _processors(facts: Mapping[str, Any]) -> Iterator[Finding]:
    cpus = facts["cpus"]
    usable = min(cpus["usable"], cpus["quota"] or cpus["usable"])
    gpus = len(facts["gpus"])
    if usable <= 1 or usable < gpus:
        of = (
            f"{usable:g} of this host's {cpus['count']} processors"
            if usable < cpus["count"]
            else f"{usable:g}"
        )
        yield Finding(
            level="warning",
            check="processors",
            where=facts["host"],
            what=f"a process here may use {of}{f' for {gpus} GPUs' if gpus else ''}: loader workers will wait in line",
            fix="srun --cpus-per-task=N, docker run --cpus=N or taskset, whichever limits it",
        )
    threads = facts["threads"]
    if threads is not None and (not threads.isdigit() or int(threads) > cpus["count"]):
        yield Finding(
            level="warning",
            check="processors",
            where=facts["host"],
            what=f"OMP_NUM_THREADS is {threads!r}, and there are {cpus['count']} processors",
            fix="unset OMP_NUM_THREADS",
        )


def _clock(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["clock"]["synchronised"] is False:
        yield Finding(
            level="note",
            check="clock",
            where=facts["host"],
            what="nobody keeps the clock right, says the kernel; times in logs of several hosts may not fit together",
            fix="timedatectl set-ntp true",
        )
