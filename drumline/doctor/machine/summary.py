"""A machine's facts as lines for a screen: a label, and what there is, in a few words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.machine.variables import MEANING, RENAMED
from drumline.text import memory_size


def machine_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """In the order of the questions that people ask."""
    return [
        (
            "host",
            f"{facts['host']} ({', '.join(facts['addresses']) or facts['name_error']}), {facts['platform']}",
        ),
        ("Python", f"{facts['python']}, {facts['executable']}"),
        ("torch", _torch(facts)),
        ("driver", facts["driver"] or "none"),
        *_gpus(facts),
        ("CUDA_VISIBLE_DEVICES", "not set" if facts["visible_gpus"] is None else repr(facts["visible_gpus"])),
        ("processors", _processors(facts["cpus"])),
        ("memory", _memory(facts["memory"])),
        ("shared memory", _free(facts["shm"]) if facts["shm"] else "none"),
        (
            "open files",
            "no limit" if facts["open_files"]["soft"] is None else str(facts["open_files"]["soft"]),
        ),
        ("run folder", _disk(facts["disk"])),
        *(("network", _network(one, facts)) for one in facts["interfaces"] if one["address"]),
        (
            "clock",
            {True: "kept right", False: "kept right by nobody"}.get(facts["clock"]["synchronised"], "?"),
        ),
        *_folders(facts),
    ]


def variable_rows(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each variable that is set: its name, its value where that may be shown, and what it does."""
    return [(name, value, _meaning(name)) for name, value in facts["variables"].items()]


def _meaning(name: str) -> str:
    if name in RENAMED:
        return f"an old name; see {RENAMED[name]}" if RENAMED[name] else "has no effect any more"
    return MEANING.get(name, "not known to drumline")


def _torch(facts: Mapping[str, Any]) -> str:
    if facts["torch"] is None:
        return "not installed"
    built = f"CUDA {facts['cuda']}, NCCL {facts['nccl'] or '?'}" if facts["cuda"] else "for the CPU"
    return f"{facts['torch']}, {built}"


def _gpus(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not facts["gpus"]:
        yield "GPUs", facts["trouble"] or "none"
    for gpu in facts["gpus"]:
        memory = f", {memory_size(gpu['memory_bytes'])}" if gpu["memory_bytes"] else ""
        yield f"GPU {gpu['index']}", f"{gpu['name']}{memory}"


def _processors(cpus: Mapping[str, Any]) -> str:
    quota = f", a container's share of {cpus['quota']:g}" if cpus["quota"] else ""
    return f"{cpus['usable']} of {cpus['count']}{quota}"


def _memory(memory: Mapping[str, Any]) -> str:
    limit = f", a container's limit of {memory_size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    return f"{memory_size(memory['bytes'])}, {memory_size(memory['available_bytes'] or 0)} free{limit}"


def _free(place: Mapping[str, Any]) -> str:
    return f"{memory_size(place['bytes'])}, {memory_size(place['free_bytes'])} free"


def _disk(disk: Mapping[str, Any]) -> str:
    if "silent" in disk:
        return f"{disk['folder']}: {disk['silent']}"
    return f"{disk['folder']} ({disk['file_system']}, {_free(disk)})"


def _network(one: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    users = [name for name in ("gloo", "nccl") if facts[f"{name}_interface"] == one["name"]]
    taken = f", {' and '.join(users).replace('nccl', 'NCCL')} would take it" if users else ""
    return f"{one['name']} {one['address']}, MTU {one['mtu']}{'' if one['is_up'] else ', down'}{taken}"


def _folders(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    code, data = facts["code"], facts["data"]
    if code and "files" in code:
        yield "code", f"{code['folder']}: {len(code['files'])} files, {code['hash']}"
    if data and "files" in data:
        more = "" if data["complete"] else " at least"
        yield (
            "data",
            f"{data['folder']}:{more} {data['files']} files, {memory_size(data['bytes'])}, {data['hash']}",
        )
