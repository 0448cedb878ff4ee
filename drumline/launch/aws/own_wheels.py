"""Drumline as it is installed here, as a wheel for the nodes: no package index has it, and whoever
took its names there could run code as root on every node."""

from __future__ import annotations

import importlib.metadata
import io
import re
import zipfile
from collections.abc import Iterator
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
# The same files give the same bytes, so that a node knows what it has installed already.
FILE_TIME = (1980, 1, 1, 0, 0, 0)
PROJECT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA_MARKER = re.compile(r"""\bextra == ["']([^"']*)["']""")


@dataclass(frozen=True)
class Wheel:
    """A wheel in memory."""

    name: str
    content: bytes


def build_wheel() -> Wheel:
    """From the files of this installation; also of an editable one."""
    installed = _installed()
    stem = f"{DRUMLINE}-{installed.version}"
    contents = dict(_package_files())
    for name in COPIED_METADATA:
        path = _metadata_folder(installed) / name
        if path.is_file():
            contents[f"{stem}.dist-info/{name}"] = path.read_bytes()

    contents[f"{stem}.dist-info/WHEEL"] = WHEEL.encode()
    record_name = f"{stem}.dist-info/RECORD"
    contents[record_name] = "".join(
        f"{name},,\n" for name in [*contents, record_name]
    ).encode()

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, FILE_TIME)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)

    return Wheel(f"{stem}-{TAG}.whl", file.getvalue())


def _installed() -> importlib.metadata.Distribution:
    """The installation that pip wrote. In a checkout a folder `*.egg-info` comes before it on the
    path: what setuptools left there when it built, without the metadata of a wheel."""
    for installed in importlib.metadata.distributions(name=DRUMLINE):
        if (_metadata_folder(installed) / "METADATA").is_file():
            return installed

    raise UsageError(
        "this installation of drumline cannot be copied: no drumline-*.dist-info has its METADATA",
        next_step="install drumline again with pip 23 or newer",
    )


def _metadata_folder(installed: importlib.metadata.Distribution) -> Path:
    """Its `*.dist-info`, which need not exist."""
    return Path(str(installed.locate_file(f"{DRUMLINE}-{installed.version}.dist-info")))


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Each file of the package: its name in a wheel, and its content."""
    folder = Path(drumline.__file__).parent
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{DRUMLINE}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def third_party_requirements() -> list[str]:
    """What drumline needs from a package index, with the extras of a node: at the versions that are
    installed here."""
    requirements = {}
    for line in _installed().requires or ():
        requirement = line.partition(";")[0]
        match = PROJECT_NAME.match(requirement)
        if is_for_nodes(line) and match is not None and match[0] not in OUR_NAMES:
            requirements[match[0]] = requirement.strip()

    return [_pinned(name, requirement) for name, requirement in requirements.items()]


def is_for_nodes(line: str) -> bool:
    """Whether a requirement is one of the core, or of an extra that nodes have."""
    extras = EXTRA_MARKER.findall(line)
    return not extras or any(extra in EXTRAS for extra in extras)


def _pinned(name: str, requirement: str) -> str:
    """`torch==2.13.0`. A suffix such as +cpu belongs to another index than that of the nodes."""
    try:
        return f"{name}=={importlib.metadata.version(name).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return requirement
