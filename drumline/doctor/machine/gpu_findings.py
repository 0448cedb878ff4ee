"""What is wrong with Python, torch, the driver and the GPUs of one machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.text import GIB, join_names, memory_size

PYTHON = (3, 11)
TORCH = (2, 11)
# The oldest driver for each CUDA: from 11 on, one that runs the first of a major version runs them all.
DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
BUSY = GIB


def gpu_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """From the outside in: Python, torch, driver, GPUs, and which of them a process would see."""
    yield from _python(facts)
    yield from _torch(facts)
    yield from _driver(facts)
    yield from _visible(facts)
    yield from _models(facts)
    yield from _busy(facts)


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _python(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if numbers(facts["python"])[:2] < PYTHON:
        what = f"Python {facts['python']} is older than 3.11"
        yield _finding(facts, "problem", "python", what, "start drumline with a newer one (--python PATH)")


def _torch(facts: Mapping[str, Any]) -> Iterator[Finding]:
    version = facts["torch"]
    if version is None:
        what = f"torch is not installed for {facts['executable']}"
        yield _finding(facts, "problem", "torch", what, "pip install 'torch>=2.11'")
    elif numbers(version)[:2] < TORCH:
        yield _finding(
            facts, "problem", "torch", f"torch {version} is older than 2.11", "pip install 'torch>=2.11'"
        )
    elif facts["gpus"] and facts["cuda"] is None:
        what = f"torch {version} was built without CUDA, and would leave {_count(facts['gpus'])} unused"
        yield _finding(facts, "problem", "torch", what, "pip uninstall torch, and install a build for CUDA")
    elif facts["cuda"] is not None and not facts["gpus"] and not facts["trouble"]:
        what = f"torch {version} was built for CUDA {facts['cuda']}, but there is no GPU here"
        yield _finding(facts, "note", "torch", what, "")


def _driver(facts: Mapping[str, Any]) -> Iterator[Finding]:
    cuda, driver = facts["cuda"], facts["driver"]
    if facts["trouble"]:
        # Without persistence mode it may only be slow to wake up; the kernel has told which GPUs there are.
        level: Level = "problem" if cuda and not facts["gpus"] else "warning"
        fix = "nvidia-smi -pm 1 makes it quick to answer; where it fails: dmesg | grep -i nvrm, and restart the machine"
        yield _finding(facts, level, "driver", facts["trouble"], fix)
    needed = DRIVERS.get(numbers(cuda)[0]) if cuda else None
    if driver and needed and numbers(driver) < needed:
        least = ".".join(map(str, needed))
        yield _finding(
            facts,
            "problem",
            "driver",
            f"the driver {driver} is too old for CUDA {cuda}, which torch was built for: it takes {least} or later",
            "update the driver (or, in a container, add cuda-compat), or install a torch for an older CUDA",
        )


def _visible(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """CUDA reads the list up to the first thing it cannot use, without a word."""
    value, gpus = facts["visible_gpus"], facts["gpus"]
    if value is None or not gpus:
        return
    check = "visible GPUs"
    words = [word.strip() for word in value.split(",")]
    everything = ",".join(str(gpu["index"]) for gpu in gpus)
    fix = f"unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES={everything}"
    start = f"CUDA_VISIBLE_DEVICES={value}"
    if words[0] in ("", "-1", "NoDevFiles"):
        yield _finding(facts, "problem", check, f"{start!s} hides {_count(gpus)} from torch", fix)
        return
    twice = sorted({word for word in words if words.count(word) > 1})
    if twice:
        what = f"{start} names {join_names(twice)} twice, so torch sees no GPU at all"
        yield _finding(facts, "problem", check, what, fix)
    for place, word in enumerate(words):
        if not _is_there(word, gpus):
            seen = f"torch sees the first {place} only" if place else "torch sees none"
            what = f"{start} names {word or 'nothing'!r}, which is not among the {_count(gpus)} of this host: {seen}"
            yield _finding(facts, "problem", check, what, fix)
            return


def num_visible(facts: Mapping[str, Any]) -> int:
    """How many GPUs torch would see."""
    value, gpus = facts["visible_gpus"], facts["gpus"]
    if value is None or facts["cuda"] is None:
        return len(gpus) if facts["cuda"] else 0
    words = [word.strip() for word in value.split(",")]
    if len(set(words)) < len(words):
        return 0
    return next((place for place, word in enumerate(words) if not _is_there(word, gpus)), len(words))


def _is_there(word: str, gpus: list[dict[str, Any]]) -> bool:
    if word.startswith("MIG-"):  # a slice of a GPU, which nvidia-smi lists elsewhere
        return True
    if word.startswith("GPU-"):
        return any(gpu["uuid"].startswith(word) for gpu in gpus)
    return word.isdigit() and int(word) < len(gpus)


def _models(facts: Mapping[str, Any]) -> Iterator[Finding]:
    models: dict[str, list[str]] = {}
    for gpu in facts["gpus"]:
        models.setdefault(gpu["name"], []).append(str(gpu["index"]))
    if len(models) > 1:
        shown = "; ".join(f"{name}: {join_names(places)}" for name, places in models.items())
        what = f"the GPUs differ, and the slowest sets the pace: {shown}"
        most = max(models.values(), key=len)
        yield _finding(facts, "warning", "gpus", what, f"export CUDA_VISIBLE_DEVICES={','.join(most)}")


def _busy(facts: Mapping[str, Any]) -> Iterator[Finding]:
    busy = [gpu for gpu in facts["gpus"] if gpu["processes"] or (gpu["used_bytes"] or 0) > BUSY]
    if not busy:
        return
    shown = join_names([f"GPU {gpu['index']} by {_users(gpu)}" for gpu in busy])
    free = ",".join(str(gpu["index"]) for gpu in facts["gpus"] if gpu not in busy)
    fix = "end them if they are yours" + (f", or export CUDA_VISIBLE_DEVICES={free}" if free else "")
    yield _finding(facts, "warning", "gpus", f"in use already: {shown}", fix)


def _users(gpu: Mapping[str, Any]) -> str:
    if not gpu["processes"]:
        return f"somebody who cannot be seen from here ({memory_size(gpu['used_bytes'])})"
    return join_names([f"{one['name']} (pid {one['pid']})" for one in gpu["processes"]])


def _count(gpus: list[Any]) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}"


def _finding(facts: Mapping[str, Any], level: Level, check: str, what: str, fix: str) -> Finding:
    return Finding(level=level, check=check, where=facts["host"], what=what, fix=fix)
