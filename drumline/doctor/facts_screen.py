"""What a machine is, in a few lines for the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.sizes import bytes_text
from drumline.doctor.variables import MEANING

Facts = Mapping[str, Any]
NAME_WIDTH = 13


def fact_lines(facts: Facts) -> Iterator[str]:
    """A line for each thing that was looked at."""
    for name, value in _facts(facts):
        yield f"{name:<{NAME_WIDTH}} {value}"


def _facts(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "host", f"{facts['host']}, {facts['platform']}"
    yield "Python", f"{facts['python']} at {facts['executable']}"
    built = [f"{name} {facts[key]}" for name, key in (("CUDA", "cuda"), ("NCCL", "nccl")) if facts[key]]
    yield "torch", " with ".join([facts["torch"] or "not installed", *([", ".join(built)] if built else [])])
    yield "GPUs", _gpus(facts)
    yield "processors", f"{facts['cpus']['usable']} of {facts['cpus']['count']}"
    memory, shm = facts["memory"], facts["shm"]
    yield "memory", f"{bytes_text(memory['available_bytes'] or 0)} free of {bytes_text(memory['bytes'] or 0)}"
    yield (
        "shared memory",
        f"{bytes_text(shm['free_bytes'])} free of {bytes_text(shm['bytes'])}" if shm else "none",
    )
    yield "open files", f"up to {facts['open_files']['soft'] or 'any number'}"
    yield "run folder", _disk(facts["disk"])
    for one in facts["interfaces"]:
        if one["is_up"] and one["address"]:
            yield "network", _network(facts, one)
    kept = {True: "kept right", False: "kept by nobody", None: "nobody can say who keeps it"}
    yield "clock", kept[facts["clock"]["synchronised"]]
    for name, value in facts["variables"].items():
        meaning = MEANING.get(name)
        yield "variable", f"{name}={value}" + (f"  ({meaning})" if meaning else "")


def _gpus(facts: Facts) -> str:
    counted: dict[str, int] = {}
    for gpu in facts["gpus"]:
        counted[gpu["name"]] = counted.get(gpu["name"], 0) + 1
    names = ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"
    return f"{names}, driver {facts['driver']}" if facts["driver"] else names


def _disk(disk: Facts) -> str:
    if "free_bytes" not in disk:
        return str(disk["folder"])
    free, size = bytes_text(disk["free_bytes"]), bytes_text(disk["bytes"])
    return f"{disk['folder']}: {free} free of {size} ({disk['file_system']})"


def _network(facts: Facts, one: Facts) -> str:
    takers = [
        library
        for library, key in (("gloo", "gloo_interface"), ("NCCL", "nccl_interface"))
        if facts[key] == one["name"]
    ]
    would = f"; {' and '.join(takers)} would take it" if takers else ""
    return f"{one['name']} {one['address']}, MTU {one['mtu']}{would}"


def measured_line(numbers: Mapping[str, float]) -> str:
    """Of the collectives on this machine."""
    return f"collectives: {measured_text(numbers) or 'no result'}"


def measured_text(numbers: Mapping[str, float]) -> str:
    """What rank 0 has measured; empty when it came to nothing."""
    if not numbers:
        return ""
    size, rate = bytes_text(int(numbers["all_reduce_bytes"])), numbers["all_reduce_gb_per_s"]
    return (
        f"all_reduce of {size} at {rate:.3g} GB/s, the smallest in {numbers['all_reduce_latency_us']:.0f} us"
    )
