"""Which packages this Python would import, and what torch was built for: read from their files, so that nothing is
imported (torch alone would take seconds)."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

NCCL_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")
NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
INFO = (".dist-info", ".egg-info")


def installed_packages(path: Iterable[str] | None = None) -> dict[str, str]:
    """Versions by name, of all; where there are two of a name, the one that would be imported."""
    versions: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, version in _packages_in(Path(folder or ".")):
            versions.setdefault(name, version)
    return dict(sorted(versions.items()))


def torch_facts(packages: dict[str, str]) -> dict[str, str | None]:
    """`torch`, and the `cuda` and `nccl` it comes with; None for what is not there."""
    version, cuda = _torch_version(packages)
    bundled = [packages[name] for name in packages if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name)]
    nccl = bundled[0] if bundled else _system_nccl() if cuda else None
    return {"torch": version, "cuda": cuda, "nccl": nccl}


def _packages_in(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name.endswith(INFO)]
    except OSError:
        return
    for file in sorted(names):
        name, _, version = file.rpartition(".")[0].partition("-")
        # Of an editable install, the name alone is in the folder's name.
        version = re.sub(r"-py\d.*$", "", version) or _noted_version(folder / file)
        yield name.lower().replace("_", "-").replace(".", "-"), version


def _noted_version(info: Path) -> str:
    try:
        text = (info / "PKG-INFO").read_text(errors="replace", encoding="utf-8")
    except OSError:
        return "?"
    found = re.search(r"^Version: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else "?"


def _torch_version(packages: dict[str, str]) -> tuple[str | None, str | None]:
    """What torch's own version.py says, which is more than what the package index was told."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None, None
    try:
        values = _constants(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        values = {}
    return values.get("__version__") or packages.get("torch", "?"), values.get("cuda")


def _constants(source: str) -> dict[str, str]:
    """The texts that a module assigns to names."""
    found = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            value = node.value.value
            found.update({t.id: value for t in targets if isinstance(t, ast.Name) and isinstance(value, str)})
    return found


def _system_nccl() -> str | None:
    """For a torch that was built against the system's NCCL: what the library's file is called."""
    for folder in NCCL_FOLDERS:
        for file in sorted(Path(folder).glob("libnccl.so.*.*.*")):
            if found := NCCL_FILE.search(file.name):
                return found[1]
    return None
