"""Facts of a healthy machine with two GPUs, of which a test changes one."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}aaa",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 80 * GIB,
        "used_bytes": 0,
        "processes": [],
        **changes,
    }


def network(name: str, address: str | None, mtu: int = 1500) -> dict[str, Any]:
    return {"name": name, "address": address, "mtu": mtu, "is_up": True}


def healthy(host: str = "node-a", **changes: Any) -> dict[str, Any]:
    """Nothing is wrong with it."""
    return {
        "host": host,
        "platform": "Linux 6.8 x86_64",
        "python": "3.12.3",
        "executable": "/env/bin/python",
        "torch": "2.13.0+cu128",
        "cuda": "12.8",
        "nccl": "2.27.5",
        "driver": "570.86.15",
        "gpus": [gpu(0), gpu(1)],
        "gpu_error": "",
        "visible_gpus": None,
        "threads": None,
        "memory": {"bytes": 512 * GIB, "available_bytes": 400 * GIB, "limit_bytes": None},
        "cpus": {"count": 32, "usable": 32, "quota": None},
        "shm": {"bytes": 256 * GIB, "free_bytes": 256 * GIB},
        "open_files": {"soft": 65536, "hard": 65536},
        "variables": {},
        "packages": {"drumline": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0"},
        "addresses": ["10.0.0.1"],
        "name_error": "",
        "interfaces": [network("lo", "127.0.0.1", 65536), network("eth0", "10.0.0.1")],
        "cards": {"rdma": [], "interfaces": {}, "nccl_plugin": None},
        "gloo_interface": "eth0",
        "nccl_interface": "eth0",
        "disk": {
            "folder": "runs",
            "parent": "/work",
            "bytes": 1000 * GIB,
            "free_bytes": 500 * GIB,
            "error": "",
            "file_system": "nfs4",
        },
        "code": None,
        "data": None,
        "clock": {"synchronised": True},
        **changes,
    }
