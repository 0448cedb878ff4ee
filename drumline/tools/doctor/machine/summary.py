"""A machine's facts as rows for the screen: a label and a short text."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.base.text import join_names, memory_size
from drumline.tools.doctor.machine.folder_hashes import MAX_CODE_FILES
from drumline.tools.doctor.machine.known_variables import meaning
from drumline.tools.doctor.machine.machine_facts import Facts

CLOCK = {
    True: "synchronized",
    False: "not synchronized",
    None: "?",
}


def machine_rows(facts: Facts) -> list[tuple[str, str]]:
    """The most important facts first:

    host           gpu-01 (10.0.0.4), Linux 6.8.0 x86_64
    torch          2.13.0+cu128, CUDA 12.8, NCCL 2.27.3
    memory         2 TiB, 1.8 TiB free
    """
    cpus = facts["cpus"]
    memory = facts["memory"]
    disk = facts["disk"]
    visible = facts["visible_gpus"]
    open_files = facts["open_files"]["soft"]
    built = f"CUDA {facts['cuda']}, NCCL {facts['nccl'] or '?'}" if facts["cuda"] else "for the CPU"
    quota = f", the container's quota is {cpus['quota']:g}" if cpus["quota"] else ""

    limit = ""
    if memory["limit_bytes"]:
        limit = f", the container's limit is {memory_size(memory['limit_bytes'])}"

    run_folder = f": {disk.get('unreachable')}"
    if "file_system" in disk:
        run_folder = f" ({disk['file_system']}, {_free(disk)})"

    addresses = ", ".join(facts["addresses"]) or facts["name_error"]
    return [
        ("host", f"{facts['host']} ({addresses}), {facts['platform']}"),
        ("Python", f"{facts['python']}, {facts['executable']}"),
        ("torch", f"{facts['torch']}, {built}" if facts["torch"] else "not installed"),
        ("driver", facts["driver"] or "none"),
        *((f"GPU {gpu['index']}", _gpu(gpu)) for gpu in facts["gpus"]),
        *([] if facts["gpus"] else [("GPUs", facts["gpu_error"] or "none")]),
        ("CUDA_VISIBLE_DEVICES", "not set" if visible is None else repr(visible)),
        ("processors", f"{cpus['usable']} of {cpus['count']}{quota}"),
        ("memory", f"{_free(memory, 'available_bytes')}{limit}"),
        ("shared memory", _free(facts["shm"]) if facts["shm"] else "none"),
        ("open files", "no limit" if open_files is None else str(open_files)),
        ("run folder", f"{disk['folder']}{run_folder}"),
        *(
            ("network", _interface(interface, facts))
            for interface in facts["interfaces"]
            if interface["address"]
        ),
        ("clock", CLOCK[facts["clock"]["synchronised"]]),
        *_code_and_data(facts),
        *(
            ("variable", f"{name}={value} ({meaning(name)})")
            for name, value in facts["variables"].items()
        ),
    ]


def _gpu(gpu: Facts) -> str:
    """`NVIDIA H100, 80 GiB`; without the memory where it is unknown."""
    if not gpu["memory_bytes"]:
        return str(gpu["name"])

    return f"{gpu['name']}, {memory_size(gpu['memory_bytes'])}"


def _free(place: Facts, free: str = "free_bytes") -> str:
    """`100 GiB, 20 GiB free`."""
    return f"{memory_size(place['bytes'])}, {memory_size(place[free] or 0)} free"


def _interface(interface: Facts, facts: Facts) -> str:
    """The address, the MTU, and which library would use it: `eth0 10.0.0.4, MTU 1500, gloo and NCCL
    would use it`."""
    name = interface["name"]
    users = [user for user in ("gloo", "NCCL") if facts[f"{user.lower()}_interface"] == name]
    used = f", {join_names(users)} would use it" if users else ""
    down = "" if interface["is_up"] else ", down"

    return f"{name} {interface['address']}, MTU {interface['mtu']}{down}{used}"


def _code_and_data(facts: Facts) -> Iterator[tuple[str, str]]:
    """A row for each folder that was read: `/home/me/job: 41 files, 5d8e0c77a1b2c3d4`."""
    code = facts["code"]
    data = facts["data"]
    if code and "files" in code:
        num_files = len(code["files"])
        first = "the first " if num_files >= MAX_CODE_FILES else ""
        yield "code", f"{code['folder']}: {first}{num_files:,} files, {code['hash']}"

    if data and "files" in data:
        at_least = "" if data["complete"] else " at least"
        yield (
            "data",
            f"{data['folder']}:{at_least} {data['files']:,} files, {memory_size(data['bytes'])}, {data['hash']}",
        )
