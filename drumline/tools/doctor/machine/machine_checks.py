"""What is wrong with one machine, from its facts only, so that local and remote hosts get the same
messages:

problem: gpu-01: torch 2.6.0 is older than 2.11
warning: gpu-01: already in use: GPU 0 by python (pid 4711)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from drumline.base.text import GIB, MIB, join_names, memory_size, plural
from drumline.net.interfaces import GLOO_VARIABLE, NCCL_VARIABLE
from drumline.tools.doctor.finding import Fault, Finding, Level, VariableFix
from drumline.tools.doctor.machine.known_variables import VISIBLE_GPUS, variable_faults
from drumline.tools.doctor.machine.machine_facts import Facts

MIN_TORCH = (2, 11)
# The oldest driver for each major version of CUDA.
MIN_DRIVERS = {
    11: (450, 80, 2),
    12: (525, 60, 13),
    13: (580,),
}
BUSY_BYTES = GIB
SHM = "/dev/shm"  # noqa: S108 - inspected, not written to
# Docker's default of 64 MiB is too small for one batch of 256 images (147 MiB), and NCCL uses about
# 10 MiB for each pair of GPUs: with GPUs it ends in a bus error. For a small job on CPUs 64 MiB are
# enough, but not half of it.
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
VOLATILE = {
    "tmpfs": "in memory, and lost when the machine stops",
    "overlay": "in the container's own layer, and lost with the container",
}
# Bridges of containers and virtual machines, which do not reach other hosts.
BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "podman", "lxcbr", "lxdbr")


def machine_findings(facts: Facts, *, many_hosts: bool = False) -> list[Finding]:
    """All that is wrong with a machine, in the order of the report.

    `many_hosts`: the job runs on other hosts too, so they must reach this one."""
    checks: tuple[tuple[str, Callable[[Facts], Iterator[Fault]]], ...] = (
        ("torch", _torch),
        ("driver", _driver),
        ("visible GPUs", _visible_gpus),
        ("gpus", _gpus),
        ("shared memory", _shared_memory),
        ("open files", _open_files),
        ("memory", _memory),
        ("disk", _disk),
        ("code", partial(_folder, name="code")),
        ("data", partial(_folder, name="data")),
        ("host name", partial(_host_name, many_hosts=many_hosts)),
        ("network", partial(_interface, library="gloo", many_hosts=many_hosts)),
        ("network", partial(_interface, library="NCCL", many_hosts=many_hosts)),
        ("processors", _processors),
        ("clock", _clock),
        ("variables", variable_faults),
    )
    return [
        Finding.of_fault(name, facts["host"], fault)
        for name, check in checks
        for fault in check(facts)
    ]


# Python, torch and GPUs


def _torch(facts: Facts) -> Iterator[Fault]:
    """Whether torch is new enough, and built for the GPUs of this machine.

    problem: torch is not installed for /usr/bin/python3
    problem: torch 2.13.0+cpu was built without CUDA and cannot use the 8 GPUs
    """
    torch = facts["torch"]
    cuda = facts["cuda"]
    gpus = facts["gpus"]

    install = "pip install 'torch>=2.11'"
    if torch is None:
        yield Fault("problem", f"torch is not installed for {facts['executable']}", install)
    elif _numbers(torch)[:2] < MIN_TORCH:
        yield Fault("problem", f"torch {torch} is older than 2.11", install)
    elif gpus and cuda is None:
        what = f"torch {torch} was built without CUDA and cannot use the {plural(len(gpus), 'GPU')}"
        yield Fault("problem", what, "pip uninstall torch, and install a CUDA build")
    elif cuda is not None and not gpus and not facts["gpu_error"]:
        yield Fault("note", f"torch {torch} was built for CUDA {cuda}, but there is no GPU", "")


def _driver(facts: Facts) -> Iterator[Fault]:
    """Whether the driver answers, and is new enough for the CUDA of torch.

    problem: driver 470.82 is too old for CUDA 12.4, which torch was built for: 525.60.13 or later ...
    warning: nvidia-smi did not answer within 1.8 s
    """
    cuda = facts["cuda"]
    driver = facts["driver"]
    if facts["gpu_error"]:
        # Without persistence mode it may only be slow to start; /proc has listed the GPUs.
        fix = "where it is slow: nvidia-smi -pm 1; where it fails: dmesg | grep -i nvrm, and restart the machine"
        yield Fault("problem" if cuda and not facts["gpus"] else "warning", facts["gpu_error"], fix)

    needed = MIN_DRIVERS.get(_numbers(cuda)[0]) if cuda else None
    if driver and needed and _numbers(driver) < needed:
        what = f"driver {driver} is too old for CUDA {cuda}, which torch was built for: "
        what += f"{'.'.join(map(str, needed))} or later is needed"
        fix = "update the driver (in a container, add cuda-compat), or install a build for an older CUDA"
        yield Fault("problem", what, fix)


def num_visible_gpus(facts: Facts) -> int:
    """How many GPUs torch sees: CUDA reads the list up to the first entry it cannot use, without a
    warning.

    `0,1,9,2` on a host with 8 GPUs are 2; `0,0` are none.
    """
    value = facts.get("visible_gpus")
    gpus = facts.get("gpus", [])
    if facts.get("cuda") is None or value is None:
        return len(gpus) if facts.get("cuda") else 0

    words = _words(value)
    return 0 if len(set(words)) < len(words) else _num_known(words, gpus)


def _visible_gpus(facts: Facts) -> Iterator[Fault]:
    """Entries of CUDA_VISIBLE_DEVICES that hide GPUs:

    CUDA_VISIBLE_DEVICES=-1 hides 8 GPUs from torch
    CUDA_VISIBLE_DEVICES=0,0,1 lists 0 twice, so torch sees no GPU at all
    CUDA_VISIBLE_DEVICES=0,9 lists '9', which is not one of the 8 GPUs of this host: torch sees ...
    """
    value = facts["visible_gpus"]
    gpus = facts["gpus"]
    if value is None or not gpus:
        return

    setting = f"{VISIBLE_GPUS}={value}"
    num_gpus = plural(len(gpus), "GPU")
    words = _words(value)
    indices = ",".join(str(gpu["index"]) for gpu in gpus)
    fix = f"unset {VISIBLE_GPUS}, or export {VISIBLE_GPUS}={indices}"

    if words[0] in ("", "-1", "NoDevFiles"):
        yield Fault("problem", f"{setting} hides {num_gpus} from torch", fix)
        return

    if twice := sorted({word for word in words if words.count(word) > 1}):
        what = f"{setting} lists {join_names(twice)} twice, so torch sees no GPU at all"
        yield Fault("problem", what, fix)

    if (num_usable := _num_known(words, gpus)) < len(words):
        visible = f"torch sees only the first {num_usable}" if num_usable else "torch sees none"
        what = f"{setting} lists {words[num_usable]!r}, which is not one of the {num_gpus} of this host: {visible}"
        yield Fault("problem", what, fix)


def _words(value: str) -> list[str]:
    """`0, 1` as ['0', '1']."""
    return [word.strip() for word in value.split(",")]


def _num_known(words: list[str], gpus: list[Facts]) -> int:
    """How many of these come before the first that is not a GPU of this machine.

    A slice of a GPU (MIG) counts as one: nvidia-smi lists it elsewhere.
    """
    for place, word in enumerate(words):
        is_uuid = word.startswith("GPU-") and any(gpu["uuid"].startswith(word) for gpu in gpus)
        is_index = word.isdigit() and int(word) < len(gpus)
        # A slice of a GPU (MIG) is listed elsewhere by nvidia-smi.
        if not (is_uuid or is_index or word.startswith("MIG-")):
            return place

    return len(words)


def _gpus(facts: Facts) -> Iterator[Fault]:
    """GPUs that differ, and those that other processes use:

    the GPUs differ, and the slowest one slows all of them: NVIDIA H100: 0 and 1; NVIDIA A100: 2
    already in use: GPU 0 by python (pid 4711)
    """
    models: dict[str, list[str]] = {}
    for gpu in facts["gpus"]:
        models.setdefault(gpu["name"], []).append(str(gpu["index"]))

    if len(models) > 1:
        shown = "; ".join(f"{name}: {join_names(places)}" for name, places in models.items())
        most = max(models.values(), key=len)
        fix = f"export {VISIBLE_GPUS}={','.join(most)}"
        what = f"the GPUs differ, and the slowest one slows all of them: {shown}"
        yield Fault("warning", what, fix)

    busy = [gpu for gpu in facts["gpus"] if _is_busy(gpu)]
    if busy:
        free = ",".join(str(gpu["index"]) for gpu in facts["gpus"] if gpu not in busy)
        fix = "stop them if they are yours"
        if free:
            fix += f", or export {VISIBLE_GPUS}={free}"

        yield Fault("warning", f"already in use: {join_names(map(_use, busy))}", fix)


def _is_busy(gpu: Facts) -> bool:
    """Whether a process uses it, also one that is not visible from here, as in another container."""
    return bool(gpu["processes"]) or (gpu["used_bytes"] or 0) > BUSY_BYTES


def _use(gpu: Facts) -> str:
    """`GPU 0 by python (pid 7)`."""
    users = join_names(f"{process['name']} (pid {process['pid']})" for process in gpu["processes"])
    hidden = f"a process that is not visible from here ({memory_size(gpu['used_bytes'] or 0)})"
    return f"GPU {gpu['index']} by {users or hidden}"


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


# Memory, files and folders


def _shared_memory(facts: Facts) -> Iterator[Fault]:
    """Whether DataLoader workers and NCCL have enough of it:

    /dev/shm has 12 MiB free of 64 MiB, less than the 128 MiB needed: DataLoader workers and NCCL ...
    """
    shm = facts["shm"]
    if shm is None:
        what = f"there is no {SHM}, through which DataLoader workers and NCCL pass tensors"
        yield Fault("problem", what, SHM_FIX)
        return

    free = shm["free_bytes"]
    size = shm["bytes"]
    needed = SHM_WITH_GPUS if facts["gpus"] else SHM_WITHOUT_GPUS
    if free >= SHM_COMFORTABLE:
        return

    level: Level = "warning"
    end = "enough only for small batches"
    if free < needed:
        level = "problem"
        end = f"less than the {memory_size(needed)} needed"

    what = (
        f"{SHM} has {memory_size(free)} free of {memory_size(size)}, {end}: "
        "DataLoader workers and NCCL crash there with a bus error"
    )
    has_leftovers = size > 2 * max(free, needed)
    fix = "delete what dead processes left in /dev/shm" if has_leftovers else SHM_FIX
    yield Fault(level, what, fix)


def _open_files(facts: Facts) -> Iterator[Fault]:
    """Whether the limit of a process is high enough:

    a process may have 1024 open files; DataLoader workers and connections to other ranks may need ...
    """
    soft = facts["open_files"]["soft"]
    hard = facts["open_files"]["hard"]
    if soft is None or soft > COMMON_OPEN_FILES:
        return

    what = f"a process may have {soft} open files; DataLoader workers and connections to other ranks may need more "
    what += "('Too many open files', 'received 0 items of ancdata')"
    fix = "docker run --ulimit nofile=65536, or raise nofile in /etc/security/limits.conf"
    if hard is None or hard > COMMON_OPEN_FILES:
        fix = f"ulimit -n {min(hard or 65536, 65536)}"

    yield Fault("problem" if soft < MIN_OPEN_FILES else "warning", what, fix)


def _memory(facts: Facts) -> Iterator[Fault]:
    """What is free, within the limit of the container:

    512 MiB of memory is free, of the container's limit of 4 GiB: a rank with DataLoader workers ...
    """
    memory = facts["memory"]
    limit = memory["limit_bytes"]
    most = limit or memory["bytes"]
    free = min(memory["available_bytes"], most)

    if free < MIN_MEMORY:
        total = memory_size(most)
        of = f"the container's limit of {total}" if limit else total
        what = f"{memory_size(free)} of memory is free, of {of}: a rank with DataLoader workers needs more"
        fix = "stop other processes, or give the container more memory (docker run --memory)"
        yield Fault("warning", what, fix)


def _disk(facts: Facts) -> Iterator[Fault]:
    """Whether the run can be saved in its folder, and stays there:

    cannot write to /data, where the run will be saved: Permission denied
    the run will be saved in memory, and lost when the machine stops (/tmp is tmpfs)
    """
    disk = facts["disk"]
    if "unreachable" in disk:
        what = f"the file system of {disk['folder']} does not respond: {disk['unreachable']}"
        yield Fault("problem", what, "check that its server is up (mount, dmesg)")
        return

    parent = disk["parent"]
    free = disk["free_bytes"]
    if disk["error"]:
        what = f"cannot write to {parent}, where the run will be saved: {disk['error']}"
        yield Fault("problem", what, "choose a folder that you can write to with --run PATH")
    elif free < DISK_LOW:
        level: Level = "problem" if free < DISK_FULL else "warning"
        what = f"{memory_size(free)} free at {parent}, where the run will be saved"
        yield Fault(level, what, "free some space, or choose another folder with --run PATH")

    if disk["file_system"] in VOLATILE:
        what = f"the run will be saved {VOLATILE[disk['file_system']]} ({parent} is {disk['file_system']})"
        yield Fault("note", what, "choose a folder on a disk or a volume with --run PATH")


def _folder(facts: Facts, *, name: str) -> Iterator[Fault]:
    """Whether the code or the data is there: `the data folder /data/train is empty`.

    `name`: which of them."""
    folder_facts = facts[name]
    if folder_facts is None:
        return

    folder = folder_facts["folder"]
    if "unreachable" in folder_facts:
        what = f"cannot read the {name} folder {folder}: {folder_facts['unreachable']}"
        fix = f"copy or mount it there, or choose another folder with --{name}"
        yield Fault("problem", what, fix)
    elif "slow" in folder_facts:
        yield Fault("note", f"reading {folder} takes over a second: the {name} is not compared", "")
    elif name == "data" and not folder_facts["files"]:
        fix = "copy the data there, or check that its volume is mounted"
        yield Fault("problem", f"the data folder {folder} is empty", fix)


# Network, processors and clock


def _host_name(facts: Facts, *, many_hosts: bool) -> Iterator[Fault]:
    """Whether the name of this host resolves to an address that others reach:

    its host name resolves to 127.0.1.1 on itself, which no other host can reach
    """
    host = facts["host"]
    outer = _outer_interface(facts)
    address = outer["address"] if outer else "ADDRESS"

    if facts["name_error"]:
        what = f"its host name does not resolve on itself ({facts['name_error']}); torchrun and gloo need it"
        level: Level = "problem" if many_hosts else "warning"
        yield Fault(level, what, f"add a line to /etc/hosts: {address} {host}")
        return

    if many_hosts and all(resolved.startswith("127.") for resolved in facts["addresses"]):
        what = f"its host name resolves to {facts['addresses'][0]} on itself, which no other host can reach"
        yield Fault("warning", what, f"map {host} to {address} in /etc/hosts")


def _interface(facts: Facts, *, library: str, many_hosts: bool) -> Iterator[Fault]:
    """The interface that gloo or NCCL would use. With several hosts, which of them is reached is
    tried (`pair_checks.py`).

    NCCL_SOCKET_IFNAME=eth9 names no interface of this host, which has lo 127.0.0.1 and eth0 10.0.0.4
    gloo would use docker0 172.17.0.1 (GLOO_SOCKET_IFNAME is not set), a bridge inside this host
    """
    variable = GLOO_VARIABLE if library == "gloo" else NCCL_VARIABLE
    value = facts["variables"].get(variable)
    outer = _outer_interface(facts)
    if library == "NCCL" and not facts["gpus"] and value is None:
        return

    chosen = facts[f"{library.lower()}_interface"]
    fix = VariableFix(variable, outer["name"]) if outer else f"export {variable}=NAME"
    addresses = {interface["name"]: interface["address"] for interface in facts["interfaces"]}
    usable = {name: address for name, address in addresses.items() if address}

    if chosen not in usable:
        if value is not None:
            names = join_names(f"{name} {address}" for name, address in usable.items())
            what = f"{variable}={value} names no interface of this host, which has {names}"
            yield Fault("problem", what, fix)

        return

    if outer is None or many_hosts:
        return

    reason = f"{variable} is not set" if value is None else f"{variable}={value}"
    if usable[chosen].startswith("127."):
        what = f"{library} would use the loopback ({chosen}; {reason}), which reaches no other host"
        yield Fault("note", what, fix)
    elif chosen.startswith(BRIDGES):
        what = (
            f"{library} would use {chosen} {usable[chosen]} ({reason}), a bridge inside this host"
        )
        yield Fault("warning", what, fix)


def _outer_interface(facts: Facts) -> Facts | None:
    """The first interface that probably reaches other hosts."""
    for interface in facts["interfaces"]:
        address = interface["address"] or "127."
        is_inner = address.startswith("127.") or interface["name"].startswith(BRIDGES)
        if interface["is_up"] and not is_inner:
            outer: Facts = interface
            return outer

    return None


def _processors(facts: Facts) -> Iterator[Fault]:
    """Whether there are enough for the GPUs: `a process may use 2 of this host's 64 processors for 8
    GPUs: DataLoader workers will compete for them`."""
    cpus = facts["cpus"]
    usable = min(cpus["usable"], cpus["quota"] or cpus["usable"])
    num_gpus = len(facts["gpus"])

    if usable <= 1 or usable < num_gpus:
        of_host = f" of this host's {cpus['count']} processors"
        of = of_host if usable < cpus["count"] else " processor"
        for_gpus = f" for {num_gpus} GPUs" if num_gpus else ""
        what = (
            f"a process may use {usable:g}{of}{for_gpus}: DataLoader workers will compete for them"
        )
        fix = "raise the limit: srun --cpus-per-task=N, docker run --cpus=N or taskset"
        yield Fault("warning", what, fix)


def _clock(facts: Facts) -> Iterator[Fault]:
    """Whether NTP keeps the clock right."""
    if facts["clock"]["synchronised"] is False:
        what = (
            "the clock is not synchronized (NTP): times in the logs of several hosts may not match"
        )
        yield Fault("note", what, "timedatectl set-ntp true")
