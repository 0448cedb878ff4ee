"""Drumline as it is installed here, as a wheel for the nodes: no package index has it, and whoever
took its names there could run code as root on every node."""

from __future__ import annotations

import importlib.metadata
import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import drumline
from drumline.base.errors import UsageError

DRUMLINE = "drumline"
OUR_NAMES = ("drumline", "drumline-lint")
"""Names of ours that no package index has."""
EXTRAS = ("aws", "storage")
"""What nodes need beside the core: they end themselves, and copy data and checkpoints."""
TAG = "py3-none-any"
WHEEL = f"Wheel-Version: 1.0\nGenerator: drumline\nRoot-Is-Purelib: true\nTag: {TAG}\n"
COPIED_METADATA = ("METADATA", "entry_points.txt")
NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")
EXTRA_MARKER = re.compile(r"""\bextra == ["']([^"']*)["']""")


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory."""

    name: str
    content: bytes


def build_wheel() -> Wheel:
    """From the files of this installation; also of an editable one."""
    metadata = _metadata_folder()
    folder = Path(drumline.__file__).parent
    contents = {
        f"{DRUMLINE}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in COPIED_METADATA:
        contents[f"{metadata.name}/{name}"] = (metadata / name).read_bytes()

    contents[f"{metadata.name}/WHEEL"] = WHEEL.encode()
    record_name = f"{metadata.name}/RECORD"
    record = [f"{name},,\n" for name in [*contents, record_name]]
    contents[record_name] = "".join(record).encode()

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            # Without a time: the same files give the same bytes, by which a node knows them.
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)

    return Wheel(f"{metadata.stem}-{TAG}.whl", file.getvalue())


def _metadata_folder() -> Path:
    """The `*.dist-info` that pip wrote. In a checkout a folder `*.egg-info` comes before it on the
    path: what setuptools left there when it built, without the metadata of a wheel."""
    for installed in importlib.metadata.distributions(name=DRUMLINE):
        name = f"{DRUMLINE}-{installed.version}.dist-info"
        folder = Path(str(installed.locate_file(name)))
        if (folder / "METADATA").is_file():
            return folder

    raise UsageError(
        "this installation of drumline cannot be copied: no drumline-*.dist-info has its METADATA",
        next_step="install drumline again with pip 23 or newer",
    )


def third_party_requirements() -> list[str]:
    """What drumline needs from a package index, with the extras of a node: at the versions that are
    installed here."""
    pinned = {}
    installed = importlib.metadata.PathDistribution(_metadata_folder())
    for line in installed.requires or ():
        requirement = line.partition(";")[0].strip()
        name = NOT_IN_NAME.split(requirement)[0]
        if name in OUR_NAMES or not is_for_nodes(line):
            continue
        try:
            # A suffix such as +cpu belongs to another index than that of the nodes.
            installed_version = importlib.metadata.version(name).partition("+")[0]
            pinned[name] = f"{name}=={installed_version}"
        except importlib.metadata.PackageNotFoundError:
            pinned[name] = requirement

    return list(pinned.values())


def is_for_nodes(line: str) -> bool:
    """Whether a requirement is one of the core, or of an extra that nodes have."""
    extras = EXTRA_MARKER.findall(line)
    return not extras or any(extra in EXTRAS for extra in extras)
