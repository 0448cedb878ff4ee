"""What a rank is about to run with, as values that can be compared: versions, variables, settings, code.

Each group has its own way to be mended. What may differ between machines without harm is not here at all; what may
differ but should be known (the kind of GPU) is a warning.
"""

from __future__ import annotations

import logging
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.distributed.agree import by_rank
from drumline.distributed.start.loaded_code import code_hashes
from drumline.errors import PreflightError

log = logging.getLogger("drumline")

Facts = Mapping[str, Mapping[str, Any]]
MOST_DIFFERENCES = 8

NEXT_STEPS = {
    "versions": "install the same versions on every node",
    "variables": "set the same environment variables on every node before the ranks start",
    "settings": "start every rank with the same command and settings",
    "code": "bring every node to the same code: the same commit, with no change of its own; if it must differ, "
    "--no-dist.same_code or DDPManager(same_code=False)",
    "machine": "The slowest sets the pace, and last bits may differ.",
}
# Groups in which a difference is told and no more.
MAY_DIFFER = {"machine"}
# What changes which collectives are called or how they are carried, so that ranks that differ wait for each other.
ANY_BACKEND = ("TORCH_DISTRIBUTED_DEBUG", "NVIDIA_TF32_OVERRIDE")
OF_BACKEND = {
    "gloo": ("GLOO_DEVICE_TRANSPORT", "TORCH_GLOO_LAZY_INIT"),
    "nccl": (
        "NCCL_ALGO",
        "NCCL_BUFFSIZE",
        "NCCL_COLLNET_ENABLE",
        "NCCL_CROSS_NIC",
        "NCCL_IB_DISABLE",
        "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MNNVL_ENABLE",
        "NCCL_NET",
        "NCCL_NTHREADS",
        "NCCL_NVLS_ENABLE",
        "NCCL_PROTO",
        "NCCL_SOCKET_FAMILY",
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
    ),
}
# A launcher's arguments, which some scripts keep among their own.
OWN_TO_A_RANK = {"rank", "local_rank", "node_rank"}
# Set to this, they say no more than if they were not set.
DEFAULTS = {
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_IB_DISABLE": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "TORCH_GLOO_LAZY_INIT": "0",
}
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Difference:
    """One thing in which ranks are not alike, with the value of each rank."""

    group: str
    name: str
    values: Sequence[Any]

    @property
    def may_be(self) -> bool:
        return self.group in MAY_DIFFER


def rank_facts(
    environment: Mapping[str, str],
    *,
    backend: str,
    device: torch.device,
    own: Mapping[str, Any],
    settings: Mapping[str, Any],
    same_code: bool = True,
) -> dict[str, dict[str, Any]]:
    """This rank's facts by group, in JSON's types. `own`: what the manager was told; `settings`: the user's own."""
    names = sorted((*ANY_BACKEND, *OF_BACKEND.get(backend, ())))
    return {
        "versions": versions(device),
        "variables": {
            f"the variable {name}": environment.get(name) or DEFAULTS.get(name, "not set") for name in names
        },
        "settings": {
            **{f"the {name}": plain(value) for name, value in own.items()},
            "the backend": backend,
            "the device": device.type,
            "the default type of tensors": str(torch.get_default_dtype()),
            **{
                f"the setting {name}": plain(value)
                for name, value in _flat(settings)
                if name not in OWN_TO_A_RANK
            },
        },
        "code": {f"the code of {name}": digest for name, digest in code_hashes().items()}
        if same_code
        else {},
        "machine": gpu_facts(device),
    }


def versions(device: torch.device) -> dict[str, Any]:
    """Of a patch more or less of Python nothing depends."""
    found: dict[str, Any] = {
        "Python's version": ".".join(platform.python_version_tuple()[:2]),
        "torch's version": torch.__version__,
        "CUDA's version": torch.version.cuda,
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL's version"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
        found["cuDNN's version"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return found


def gpu_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    try:
        driver = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
    except OSError:
        driver = None
    return {
        "the kind of GPU": torch.cuda.get_device_name(device),
        "the driver's version": driver.group() if driver else "not known",
    }


def check_differences(everyone: Sequence[Facts], hosts: Sequence[str]) -> None:
    """Raise with the value of each rank, given what all of them said; what may differ is a warning."""
    found = differences(everyone)
    for one in found:
        if one.may_be:
            log.warning(f"ranks differ in {one.name}: {by_rank(one.values, hosts)}. {NEXT_STEPS[one.group]}")
    wrong = [one for one in found if not one.may_be]
    if not wrong:
        return
    lines = [f"{one.name}: {by_rank(one.values, hosts)}" for one in wrong[:MOST_DIFFERENCES]]
    if len(wrong) > MOST_DIFFERENCES:
        lines.append(f"and {len(wrong) - MOST_DIFFERENCES} more")
    text = lines[0] if len(lines) == 1 else f"{len(wrong)} things:\n  - " + "\n  - ".join(lines)
    groups = dict.fromkeys(one.group for one in wrong)
    raise PreflightError(
        f"ranks differ in {text}", next_step="; ".join(NEXT_STEPS[group] for group in groups)
    )


def differences(everyone: Sequence[Facts]) -> list[Difference]:
    """In the order of the groups. A module that some ranks have not loaded is no difference: rank 0 may well have
    imported more than the others."""
    found = []
    for group in NEXT_STEPS:
        parts = [facts.get(group, {}) for facts in everyone]
        for name in dict.fromkeys(name for part in parts for name in part):
            values = [part.get(name) for part in parts]
            known = [value for value in values if value is not None] if group == "code" else values
            if any(value != known[0] for value in known):
                found.append(Difference(group, name, values))
    return found


def plain(value: Any) -> Any:
    """The value in JSON's types, the same on every rank for the same value."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, float) and math.isnan(value):
        return "nan"  # which is no other one than itself
    if value is None or isinstance(value, str | int | float | bool):
        return value
    text = str(value)
    # An address in memory is another one in every process.
    return type(value).__qualname__ if re.search(r" at 0x[0-9a-f]+", text) else text


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
