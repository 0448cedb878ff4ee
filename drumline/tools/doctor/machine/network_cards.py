"""The network cards of this machine, from /sys: InfiniBand, RoCE and EFA cards, the speed and
vendor of interfaces, and NCCL's network plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.tools.doctor.machine.gpus import file_text

CLASSES = Path("/sys/class")
RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec")
KINDS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
EFA_DRIVER = "efa"
PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib",
)


def card_facts(environment: Mapping[str, str], classes: Path = CLASSES) -> dict[str, Any]:
    """`rdma`: a card for each active port; `interfaces`: `gbit` and `vendor` by name, where the
    kernel knows them; `nccl_plugin`: its path, or None."""
    return {
        "rdma": [port for card in _entries(classes / "infiniband") for port in _active_ports(card)],
        "interfaces": {
            interface.name: _interface(interface) for interface in _entries(classes / "net")
        },
        "nccl_plugin": _plugin(environment.get("LD_LIBRARY_PATH", "")),
    }


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _active_ports(card: Path) -> list[dict[str, Any]]:
    is_efa = (card / "device" / "driver").resolve().name == EFA_DRIVER
    active = []
    for port in _entries(card / "ports"):
        kind = "EFA" if is_efa else KINDS.get(file_text(port / "link_layer").strip())
        rate = RATE.match(file_text(port / "rate"))
        if kind and "ACTIVE" in file_text(port / "state"):
            active.append(
                {"name": card.name, "kind": kind, "gbit": float(rate[1]) if rate else None}
            )
    return active


def _interface(folder: Path) -> dict[str, Any]:
    speed = file_text(folder / "speed").strip()  # in Mbit/s; -1: unknown
    gbit = int(speed) / 1000 if speed.isdigit() else None
    return {"gbit": gbit, "vendor": file_text(folder / "device" / "vendor").strip() or None}


def _plugin(library_path: str) -> str | None:
    folders = [*filter(None, library_path.split(":")), *PLUGIN_FOLDERS]
    files = (Path(folder, name) for folder in folders for name in PLUGINS)
    return next((str(file) for file in files if file.is_file()), None)
