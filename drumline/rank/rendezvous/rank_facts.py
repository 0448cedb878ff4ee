"""What a rank is about to run with, as comparable values: versions, variables, settings, code.

Code is a hash of every loaded module that is not part of an installed package, by the module's
name: the same checkout may have another path on each node.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import blake3
import torch

# Variables that change collectives or their transport, so that ranks that differ would wait for
# each other.
ANY_BACKEND = ("TORCH_DISTRIBUTED_DEBUG", "NVIDIA_TF32_OVERRIDE")
OF_BACKEND = {
    "gloo": ("GLOO_DEVICE_TRANSPORT", "TORCH_GLOO_LAZY_INIT"),
    "nccl": (
        "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_CROSS_NIC", "NCCL_IB_DISABLE", "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MNNVL_ENABLE", "NCCL_NET", "NCCL_NTHREADS",
        "NCCL_NVLS_ENABLE", "NCCL_PROTO", "NCCL_SOCKET_FAMILY", "TORCH_NCCL_USE_COMM_NONBLOCKING",
    ),
}  # fmt: skip

# Arguments of launchers, which some scripts keep in their settings.
OWN_TO_A_RANK = {"rank", "local_rank", "node_rank"}

# Values that mean the same as not set.
DEFAULTS = {
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_IB_DISABLE": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "TORCH_GLOO_LAZY_INIT": "0",
}
DRIVER = Path("/proc/driver/nvidia/version")
OWN = "drumline"
INSTALLED = ("site-packages", "dist-packages")
LIBRARY = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib"))


def rank_facts(
    environment: Mapping[str, str],
    *,
    backend: str,
    device: torch.device,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    same_code: bool = True,
) -> dict[str, dict[str, Any]]:
    """This rank's facts by group, in JSON's types. `own`: the manager's options; `settings`: the
    user's own."""
    names = sorted((*ANY_BACKEND, *OF_BACKEND.get(backend, ())))
    hashes = code_hashes() if same_code else {}
    return {
        "versions": versions(device),
        "variables": {
            f"the variable {name}": environment.get(name) or DEFAULTS.get(name, "not set")
            for name in names
        },
        "settings": {
            **{f"the {name}": plain(value) for name, value in options.items()},
            "the backend": backend,
            "the device": device.type,
            "the default type of tensors": str(torch.get_default_dtype()),
            **{
                f"the setting {name}": plain(value)
                for name, value in _flat(settings)
                if name not in OWN_TO_A_RANK
            },
        },
        "code": {f"the code of {name}": digest for name, digest in hashes.items()},
        "machine": gpu_facts(device),
    }


def versions(device: torch.device) -> dict[str, Any]:
    """The parts of versions on which a run depends; not the patch version of Python."""
    facts: dict[str, Any] = {
        "Python's version": ".".join(platform.python_version_tuple()[:2]),
        "torch's version": torch.__version__,
        "CUDA's version": torch.version.cuda,
    }
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["NCCL's version"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
        facts["cuDNN's version"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]

    return facts


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """The kind of GPU and its driver; empty without one."""
    if device.type != "cuda":
        return {}

    try:
        driver = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        driver = None

    return {
        "the kind of GPU": torch.cuda.get_device_name(device),
        "the driver's version": driver.group() if driver else "not known",
    }


def plain(value: Any) -> Any:
    """The value in JSON's types, the same on every rank for the same value."""
    return json.loads(json.dumps(value, default=_simplified, skipkeys=True), parse_constant=str)


def _simplified(value: Any) -> Any:
    """A value that JSON does not know, as one that it does."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))

    text = str(value)
    # A memory address differs in every process.
    return type(value).__qualname__ if re.search(r" at 0x[0-9a-f]+", text) else text


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their full names, as in `optim.lr`."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def is_installed(file: str) -> bool:
    """Whether a module is a part of Python, or of an installed package."""
    return file.startswith(LIBRARY) or any(f"/{name}/" in file for name in INSTALLED)


def code_hashes() -> dict[str, str]:
    """A short hash by the name of each module of the user's own code and of Drumline."""
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        try:
            # Not getattr: some modules are loaded by the first attribute access.
            file: str = object.__getattribute__(module, "__dict__")["__file__"]
            is_own = name.partition(".")[0] == OWN
            if not file.endswith(".py") or (is_installed(file) and not is_own):
                continue
            text = Path(file).read_bytes()
        except (AttributeError, KeyError, OSError):
            # no module, no file, or removed since
            continue

        # The script is always called __main__; its file's name is clearer. A forked rank has it
        # twice.
        shown = Path(file).name if name in ("__main__", "__mp_main__") else name

        # A checkout on another system may have other line endings.
        hashes[shown] = blake3.blake3(text.replace(b"\r\n", b"\n")).hexdigest(6)

    return hashes
