"""What this machine lacks for making hosts, as the one reason that the tests in this folder are
skipped with.

Slurm has a reason of its own: without it all other tests run.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

# The tool, and the Debian package that `install.sh` gets it from.
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "cc": "build-essential",
}
SLURM_TOOLS = {
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "scontrol": "slurm-wlm",
}
BROWSER = {"chromium": "chromium"}
PROMETHEUS = {"promtool": "prometheus"}
# Where they lie, also for a user whose PATH leaves the administrator's folders out.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@functools.cache
def tool(name: str) -> str:
    """The whole path of a tool; sshd insists on being started by it."""
    path = shutil.which(name, path=SEARCH_PATH)
    assert path, f"{name} is not installed"
    return path


@functools.cache
def missing() -> str | None:
    """Why no hosts can be made here; nothing when they can."""
    lacks = ["root"] if os.geteuid() != 0 else []
    lacks += _absent(TOOLS)
    if not lacks and not _may_make_namespaces():
        lacks = ["the right to make network, mount and process namespaces (CAP_SYS_ADMIN)"]
    return f"hosts on one machine need {', '.join(lacks)}" if lacks else None


@functools.cache
def missing_browser() -> str | None:
    """Why no page can be opened; nothing when it can."""
    absent = _absent(BROWSER)
    return f"a real browser needs {', '.join(absent)}" if absent else None


@functools.cache
def missing_slurm() -> str | None:
    """Why Slurm cannot be run on hosts; nothing when it can."""
    absent = _absent(SLURM_TOOLS)
    return f"a Slurm cluster on one machine needs {', '.join(absent)}" if absent else None


def _absent(tools: dict[str, str]) -> list[str]:
    return [
        f"{name} (apt-get install {package})"
        for name, package in tools.items()
        if shutil.which(name, path=SEARCH_PATH) is None
    ]


def _may_make_namespaces() -> bool:
    command = [
        tool("unshare"),
        "--net",
        "--uts",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "true",
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
