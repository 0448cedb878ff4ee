"""What is wrong with one machine, from its facts alone, so that a remote host is judged in the same words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.doctor.machine.gpu_checks import gpu_findings
from drumline.doctor.machine.known_variables import variable_findings
from drumline.net.interfaces import GLOO_VARIABLE, NCCL_VARIABLE
from drumline.text import GIB, MIB, join_names, memory_size

SHM = "/dev/shm"  # noqa: S108 - inspected, not written to
# Docker's default of 64 MiB does not hold one batch of 256 images (147 MiB), and NCCL puts about 10 MiB there for each
# pair of GPUs: with GPUs it ends in a bus error. A small job on CPUs gets by with that, but not with half of it.
SHM_WITH_GPUS = 128 * MIB
SHM_WITHOUT_GPUS = 32 * MIB
# Four workers with two batches each.
SHM_COMFORTABLE = GIB
SHM_FIX = (
    "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm; "
    "on your own machine: mount -o remount,size=8G /dev/shm"
)
MIN_OPEN_FILES = 256
COMMON_OPEN_FILES = 1024
MIN_MEMORY = GIB
DISK_FULL = GIB
DISK_LOW = 10 * GIB
MIN_FREE_FILES = 1000
VOLATILE = {
    "tmpfs": "in memory, and lost when the machine stops",
    "overlay": "in the container's own layer, and lost with the container",
}
# Bridges of containers and virtual machines, which reach no other host.
BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "podman", "lxcbr", "lxdbr")

Facts = Mapping[str, Any]


def machine_findings(facts: Facts, *, many_hosts: bool = False) -> list[Finding]:
    """`many_hosts`: the job runs on other hosts too, so they must reach this one."""
    return [
        *gpu_findings(facts),
        *_shared_memory(facts),
        *_open_files(facts),
        *_memory(facts),
        *_disk(facts),
        *_code_and_data(facts),
        *_host_name(facts, many_hosts),
        *_interface(facts, "gloo", GLOO_VARIABLE, many_hosts),
        *_interface(facts, "NCCL", NCCL_VARIABLE, many_hosts),
        *_processors(facts),
        *_clock(facts),
        *variable_findings(facts),
    ]


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    host, shm, check = facts["host"], facts["shm"], "shared memory"
    if shm is None:
        what = f"there is no {SHM}, through which DataLoader workers and NCCL pass tensors"
        yield Finding("problem", check, host, what, SHM_FIX)
        return
    free, size = shm["free_bytes"], shm["bytes"]
    needed = SHM_WITH_GPUS if facts["gpus"] else SHM_WITHOUT_GPUS
    if free >= SHM_COMFORTABLE:
        return
    level: Level = "problem" if free < needed else "warning"
    end = f"less than the {memory_size(needed)} needed" if free < needed else "enough only for small batches"
    what = f"{SHM} has {memory_size(free)} free of {memory_size(size)}, {end}: "
    what += "DataLoader workers and NCCL crash there with a bus error"
    left_over = size > 2 * max(free, needed)
    fix = "delete what dead processes left in /dev/shm" if left_over else SHM_FIX
    yield Finding(level, check, host, what, fix)


def _open_files(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts["open_files"]["soft"], facts["open_files"]["hard"]
    if soft is None or soft > COMMON_OPEN_FILES:
        return
    level: Level = "problem" if soft < MIN_OPEN_FILES else "warning"
    what = f"a process may have {soft} open files; DataLoader workers and connections to other ranks may need more "
    what += "('Too many open files', 'received 0 items of ancdata')"
    fix = "docker run --ulimit nofile=65536, or raise nofile in /etc/security/limits.conf"
    if hard is None or hard > COMMON_OPEN_FILES:
        fix = f"ulimit -n {min(hard or 65536, 65536)}"
    yield Finding(level, "open files", facts["host"], what, fix)


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts["memory"]
    limit = memory["limit_bytes"]
    free = min(n for n in (memory["available_bytes"], limit, memory["bytes"]) if n is not None)
    if free < MIN_MEMORY:
        of = f"the container's limit of {memory_size(limit)}" if limit else memory_size(memory["bytes"])
        what = f"{memory_size(free)} of memory is free, of {of}: a rank with DataLoader workers needs more"
        fix = "stop other processes, or give the container more memory (docker run --memory)"
        yield Finding("warning", "memory", facts["host"], what, fix)


def _disk(facts: Facts) -> Iterator[Finding]:
    disk, host = facts["disk"], facts["host"]
    if "unreachable" in disk:
        what = f"the file system of {disk['folder']} does not respond: {disk['unreachable']}"
        yield Finding("problem", "disk", host, what, "check that its server is up (mount, dmesg)")
        return
    parent, free, free_files = disk["parent"], disk["free_bytes"], disk["free_files"]
    if disk["error"]:
        what = f"cannot write to {parent}, where the run will be saved: {disk['error']}"
        yield Finding("problem", "disk", host, what, "choose a folder that you can write to with --run PATH")
    elif free < DISK_LOW:
        what = f"{memory_size(free)} free at {parent}, where the run will be saved"
        fix = "free some space, or choose another folder with --run PATH"
        yield Finding("problem" if free < DISK_FULL else "warning", "disk", host, what, fix)
    if free_files is not None and free_files < MIN_FREE_FILES:
        what = f"the disk of {parent} has room for only {free_files} more files"
        yield Finding("problem", "disk", host, what, "delete files that are not needed (df -i counts them)")
    if disk["file_system"] in VOLATILE:
        what = f"the run will be saved {VOLATILE[disk['file_system']]} ({parent} is {disk['file_system']})"
        yield Finding("note", "disk", host, what, "choose a folder on a disk or a volume with --run PATH")


def _code_and_data(facts: Facts) -> Iterator[Finding]:
    host = facts["host"]
    for name in ("code", "data"):
        if (found := facts[name]) is None:
            continue
        folder = found["folder"]
        if reason := found.get("unreachable") or ("it does not exist" if found["missing"] else ""):
            fix = f"copy or mount it there, or choose another folder with --{name}"
            yield Finding("problem", name, host, f"cannot read the {name} folder {folder}: {reason}", fix)
        elif name == "data" and not found["files"]:
            fix = "copy the data there, or check that its volume is mounted"
            yield Finding("problem", name, host, f"the data folder {folder} is empty", fix)


def _host_name(facts: Facts, many_hosts: bool) -> Iterator[Finding]:
    host, outer = facts["host"], _outer_interface(facts)
    address = outer["address"] if outer else "ADDRESS"
    if facts["name_error"]:
        what = f"its host name does not resolve on itself ({facts['name_error']}); torchrun and gloo need it"
        fix = f"add a line to /etc/hosts: {address} {host}"
        yield Finding("problem" if many_hosts else "warning", "host name", host, what, fix)
    elif many_hosts and all(one.startswith("127.") for one in facts["addresses"]):
        what = f"its host name resolves to {facts['addresses'][0]} on itself, which no other host can reach"
        yield Finding("warning", "host name", host, what, f"map {host} to {address} in /etc/hosts")


def _interface(facts: Facts, library: str, variable: str, many_hosts: bool) -> Iterator[Finding]:
    """The one that gloo or NCCL would use. For a job on this machine alone, the loopback is as good as any."""
    host, value, outer = facts["host"], facts["variables"].get(variable), _outer_interface(facts)
    if library == "NCCL" and not facts["gpus"] and value is None:
        return
    chosen = facts[f"{library.lower()}_interface"]
    fix = f"export {variable}={outer['name'] if outer else 'NAME'}"
    usable = {one["name"]: one["address"] for one in facts["interfaces"] if one["address"]}
    if chosen not in usable:
        if value is not None:
            names = join_names(f"{name} {address}" for name, address in usable.items())
            what = f"{variable}={value} names no interface of this host, which has {names}"
            yield Finding("problem", "network", host, what, fix)
        return
    if outer is None and not many_hosts:
        return  # a machine without a network
    reason = f"{variable} is not set" if value is None else f"{variable}={value}"
    if usable[chosen].startswith("127."):
        what = f"{library} would use the loopback ({chosen}; {reason}), which reaches no other host"
        yield Finding("problem" if many_hosts else "note", "network", host, what, fix)
    elif chosen.startswith(BRIDGES):
        what = f"{library} would use {chosen} {usable[chosen]} ({reason}), a bridge inside this host"
        yield Finding("problem" if many_hosts else "warning", "network", host, what, fix)


def _outer_interface(facts: Facts) -> dict[str, Any] | None:
    """The first that looks as if it reached other hosts."""
    for one in facts["interfaces"]:
        is_inner = (one["address"] or "127.").startswith("127.") or one["name"].startswith(BRIDGES)
        if one["is_up"] and not is_inner:
            found: dict[str, Any] = one
            return found
    return None


def _processors(facts: Facts) -> Iterator[Finding]:
    cpus, host, threads = facts["cpus"], facts["host"], facts["threads"]
    usable, num_gpus = min(cpus["usable"], cpus["quota"] or cpus["usable"]), len(facts["gpus"])
    if usable <= 1 or usable < num_gpus:
        of = f" of this host's {cpus['count']} processors" if usable < cpus["count"] else " processor"
        for_gpus = f" for {num_gpus} GPUs" if num_gpus else ""
        what = f"a process may use {usable:g}{of}{for_gpus}: DataLoader workers will compete for them"
        fix = "raise the limit: srun --cpus-per-task=N, docker run --cpus=N or taskset"
        yield Finding("warning", "processors", host, what, fix)
    if threads is not None and (not threads.isdigit() or int(threads) > cpus["count"]):
        what = f"OMP_NUM_THREADS is {threads!r}, but there are {cpus['count']} processors"
        yield Finding("warning", "processors", host, what, "unset OMP_NUM_THREADS")


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts["clock"]["synchronised"] is False:
        what = "the clock is not synchronized (NTP): times in the logs of several hosts may not match"
        yield Finding("note", "clock", facts["host"], what, "timedatectl set-ntp true")
