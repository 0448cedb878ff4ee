"""The packages this Python would import, and what torch was built for: read from files, without importing anything."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from drumline.doctor.machine.system import read_file

NCCL_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")
NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
# `cuda: Optional[str] = '13.0'`
TEXT_CONSTANT = re.compile(r"""^(\w+)(?:\s*:[^=]*)?\s*=\s*['"]([^'"]*)['"]""", re.MULTILINE)


def installed_packages(path: Iterable[str] | None = None) -> dict[str, str]:
    """Versions by name; of two with one name, the one that would be imported."""
    versions: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, version in _packages_in(Path(folder or ".")):
            versions.setdefault(name, version)
    return dict(sorted(versions.items()))


def torch_facts(packages: dict[str, str]) -> dict[str, str | None]:
    """`torch`, and the `cuda` and `nccl` that come with it; None for what is missing."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return {"torch": None, "cuda": None, "nccl": None}
    # torch's own version.py says more than the name of its package: `2.13.0+cu128`.
    values = dict(TEXT_CONSTANT.findall(read_file(Path(spec.origin).with_name("version.py"))))
    cuda = values.get("cuda")
    bundled = [packages[name] for name in packages if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name)]
    return {
        "torch": values.get("__version__") or packages.get("torch", "?"),
        "cuda": cuda,
        "nccl": bundled[0] if bundled else _system_nccl() if cuda else None,
    }


def _packages_in(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return
    for file in sorted(names):
        name, _, version = file.rpartition(".")[0].partition("-")
        version = re.sub(r"-py\d.*$", "", version)
        if not version:  # an editable install has only the name in its folder's name
            noted = re.search(r"^Version: (.*)$", read_file(folder / file / "PKG-INFO"), re.MULTILINE)
            version = noted[1].strip() if noted else "?"
        yield name.lower().replace("_", "-").replace(".", "-"), version


def _system_nccl() -> str | None:
    """For a torch that was built against the system's NCCL: the version in the library's file name."""
    files = (file for folder in NCCL_FOLDERS for file in sorted(Path(folder).glob("libnccl.so.*.*.*")))
    return next((found[1] for file in files if (found := NCCL_FILE.search(file.name))), None)
