"""DL144: a variable whose name is almost one that PyTorch or NCCL reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.environment import launch_variables
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL144")
_READ = tuple(
    "CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME LOCAL_RANK "
    "LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NCCL_ALGO NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT "
    "NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA "
    "NCCL_IB_TIMEOUT NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_P2P_DISABLE NCCL_P2P_LEVEL "
    "NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF "
    "TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT WORLD_SIZE".split()
)
_OTHER_NAMES = {
    "MASTER_ADDRESS": "MASTER_ADDR",
    "MASTER_IP": "MASTER_ADDR",
    "NCCL_SOCKET_IFACE": "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_GPUS": "CUDA_VISIBLE_DEVICES",
}
_ALIKE = 0.92
_OTHER_LIBRARIES = ("HCCL_", "RCCL_", "MCCL_", "XCCL_", "UCCL_")
"""Collectives of other accelerators, with variables of their own."""


def check_shell(script: Script) -> Iterator[Finding]:
    if not launches(script):
        return
    variables = launch_variables(script)
    assigned = {item.assignment.name for item in variables}
    for item in variables:
        name = item.assignment.name
        meant = _meant(name)
        is_used = re.search(rf"\$\{{?{name}\b", script.text) is not None
        if meant and meant not in assigned and not is_used:
            message = f"nothing reads {name}: the variable is called {meant}"
            yield RULE.at(script, item.assignment, message, fix=f"write {meant}")


def _meant(name: str) -> str:
    if name in _READ or name.startswith(_OTHER_LIBRARIES):
        return ""
    close = difflib.get_close_matches(name.upper(), _READ, 1, _ALIKE)
    return _OTHER_NAMES.get(name) or next(iter(close), "")
