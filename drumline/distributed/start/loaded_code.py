"""The code that this rank runs: a hash of every loaded module that is not part of an installed package.

Folders are not searched: what is loaded is what runs, wherever it lies. The names are those of the modules, because
the same checkout may lie in another place on each node.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import blake3

OWN = "drumline"
INSTALLED = ("site-packages", "dist-packages")
MOST_MODULES = 2000
MOST_BYTES = 4 << 20


def code_hashes() -> dict[str, str]:
    """A short hash by the name of each module of the user's own code and of Drumline."""
    library = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib"))
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = _source(name, module, library)
        if file is None or (digest := _hash(file)) is None:
            continue
        # The script is called __main__ by everyone; its file's name says more. A forked rank has it twice.
        shown = Path(file).name if name in ("__main__", "__mp_main__") else name
        hashes[shown] = digest
        if len(hashes) == MOST_MODULES:
            break
    return hashes


def _source(name: str, module: ModuleType | None, library: tuple[str, ...]) -> str | None:
    # Not getattr: some modules load themselves when they are asked for anything.
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # anything may stand among the modules
        return None
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    if name.partition(".")[0] == OWN:
        return file
    if file.startswith(library) or any(f"/{word}/" in file for word in INSTALLED):
        return None
    return file


def _hash(file: str) -> str | None:
    try:
        with Path(file).open("rb") as source:
            text = source.read(MOST_BYTES)
    except OSError:  # removed since, or inside an archive
        return None
    # A checkout on another system may end its lines otherwise.
    return blake3.blake3(text.replace(b"\r\n", b"\n")).hexdigest(6)
