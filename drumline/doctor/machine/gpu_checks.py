"""What is wrong with Python, torch, the driver and the GPUs of one machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.doctor.machine.known_variables import VISIBLE_GPUS
from drumline.text import GIB, join_names, memory_size, plural

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
# The oldest driver of each CUDA: from 11 on, one that runs the first of a major version runs them all.
MIN_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}
BUSY_BYTES = GIB

Facts = Mapping[str, Any]


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """From the outside in: Python, torch, driver, GPUs, and which of them a process sees."""
    yield from _python_and_torch(facts)
    yield from _driver(facts)
    yield from _visible(facts)
    yield from _models(facts)
    yield from _busy(facts)


def num_visible_gpus(facts: Facts) -> int:
    """How many GPUs torch sees: CUDA reads the list up to the first entry it cannot use, without a warning."""
    value, gpus = facts.get("visible_gpus"), facts.get("gpus", [])
    if facts.get("cuda") is None or value is None:
        return len(gpus) if facts.get("cuda") else 0
    words = [word.strip() for word in value.split(",")]
    if len(set(words)) < len(words):
        return 0
    return next((place for place, word in enumerate(words) if not _exists(word, gpus)), len(words))


def _python_and_torch(facts: Facts) -> Iterator[Finding]:
    host, torch, cuda, gpus = facts["host"], facts["torch"], facts["cuda"], facts["gpus"]
    install = "pip install 'torch>=2.11'"
    if _numbers(facts["python"])[:2] < MIN_PYTHON:
        what = f"Python {facts['python']} is older than 3.11"
        yield Finding("problem", "python", host, what, "use a newer Python (--python PATH)")
    if torch is None:
        yield Finding("problem", "torch", host, f"torch is not installed for {facts['executable']}", install)
    elif _numbers(torch)[:2] < MIN_TORCH:
        yield Finding("problem", "torch", host, f"torch {torch} is older than 2.11", install)
    elif gpus and cuda is None:
        what = f"torch {torch} was built without CUDA and cannot use the {plural(len(gpus), 'GPU')}"
        yield Finding("problem", "torch", host, what, "pip uninstall torch, and install a CUDA build")
    elif cuda is not None and not gpus and not facts["gpu_error"]:
        yield Finding("note", "torch", host, f"torch {torch} was built for CUDA {cuda}, but there is no GPU")


def _driver(facts: Facts) -> Iterator[Finding]:
    cuda, driver, host = facts["cuda"], facts["driver"], facts["host"]
    if facts["gpu_error"]:
        # Without persistence mode it may only be slow to wake up; /proc has listed the GPUs.
        fix = "where it is slow: nvidia-smi -pm 1; where it fails: dmesg | grep -i nvrm, and restart the machine"
        level: Level = "problem" if cuda and not facts["gpus"] else "warning"
        yield Finding(level, "driver", host, facts["gpu_error"], fix)
    needed = MIN_DRIVERS.get(_numbers(cuda)[0]) if cuda else None
    if driver and needed and _numbers(driver) < needed:
        what = f"driver {driver} is too old for CUDA {cuda}, which torch was built for: "
        what += f"{'.'.join(map(str, needed))} or later is needed"
        fix = "update the driver (in a container, add cuda-compat), or install a build for an older CUDA"
        yield Finding("problem", "driver", host, what, fix)


def _visible(facts: Facts) -> Iterator[Finding]:
    value, gpus, host = facts["visible_gpus"], facts["gpus"], facts["host"]
    if value is None or not gpus:
        return
    check, setting, num_gpus = "visible GPUs", f"{VISIBLE_GPUS}={value}", plural(len(gpus), "GPU")
    fix = f"unset {VISIBLE_GPUS}, or export {VISIBLE_GPUS}={','.join(str(gpu['index']) for gpu in gpus)}"
    words = [word.strip() for word in value.split(",")]
    if words[0] in ("", "-1", "NoDevFiles"):
        yield Finding("problem", check, host, f"{setting} hides {num_gpus} from torch", fix)
        return
    if twice := sorted({word for word in words if words.count(word) > 1}):
        what = f"{setting} lists {join_names(twice)} twice, so torch sees no GPU at all"
        yield Finding("problem", check, host, what, fix)
    unknown = next((place for place, word in enumerate(words) if not _exists(word, gpus)), None)
    if unknown is not None:
        seen = f"torch sees only the first {unknown}" if unknown else "torch sees none"
        what = f"{setting} lists {words[unknown]!r}, which is not one of the {num_gpus} of this host: {seen}"
        yield Finding("problem", check, host, what, fix)


def _exists(word: str, gpus: list[dict[str, Any]]) -> bool:
    if word.startswith("MIG-"):  # a slice of a GPU, which nvidia-smi lists elsewhere
        return True
    if word.startswith("GPU-"):
        return any(gpu["uuid"].startswith(word) for gpu in gpus)
    return word.isdigit() and int(word) < len(gpus)


def _models(facts: Facts) -> Iterator[Finding]:
    models: dict[str, list[str]] = {}
    for gpu in facts["gpus"]:
        models.setdefault(gpu["name"], []).append(str(gpu["index"]))
    if len(models) > 1:
        shown = "; ".join(f"{name}: {join_names(places)}" for name, places in models.items())
        most = max(models.values(), key=len)
        fix = f"export {VISIBLE_GPUS}={','.join(most)}"
        what = f"the GPUs differ, and the slowest sets the pace: {shown}"
        yield Finding("warning", "gpus", facts["host"], what, fix)


def _busy(facts: Facts) -> Iterator[Finding]:
    busy = [gpu for gpu in facts["gpus"] if gpu["processes"] or (gpu["used_bytes"] or 0) > BUSY_BYTES]
    if busy:
        free = ",".join(str(gpu["index"]) for gpu in facts["gpus"] if gpu not in busy)
        fix = "stop them if they are yours" + (f", or export {VISIBLE_GPUS}={free}" if free else "")
        what = f"already in use: {join_names(map(_use, busy))}"
        yield Finding("warning", "gpus", facts["host"], what, fix)


def _use(gpu: Mapping[str, Any]) -> str:
    users = join_names(f"{one['name']} (pid {one['pid']})" for one in gpu["processes"])
    hidden = f"a process that is not visible from here ({memory_size(gpu['used_bytes'] or 0)})"
    return f"GPU {gpu['index']} by {users or hidden}"


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
