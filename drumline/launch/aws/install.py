"""`--install`: what pip installs on the nodes, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from drumline.base.text import CREDENTIALS
from drumline.base.untrusted import read_toml
from drumline.launch.aws.own_wheels import OUR_NAMES, third_party_requirements

THIS_INSTALLATION = "drumline"
"""As a word of `--install`: what runs here, copied to the nodes."""
# Part of a shell script on the nodes.
REQUIREMENT = re.compile(r"[A-Za-z0-9_.,:/@+=\[\]#&~-]+")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9._,-]*\])?"
PINNED = re.compile(
    rf"{_NAME}==[0-9][A-Za-z0-9.+_-]*"
    rf"|(?:{_NAME}@)?git\+[a-z]+://[^@#]+@[0-9a-f]{{40}}(?:#.*)?"
    rf"|(?:{_NAME}@)?https?://[^@#]+\.whl"
)
"""A whole word: pip takes `drumline~=0.1,==0.1.0` too, and asks an index for it."""
# A wheel or a folder of this machine, as pip takes it: dist/mine-1.0-py3-none-any.whl, .[train], or
# file:///...
LOCAL = re.compile(r"(\.{0,2}/.*|\.{1,2}|[^:]*\.whl)(\[.*\])?|.*\bfile:.*")
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^\]]*\])?(@|==)")


def copies_drumline(install: str) -> bool:
    """Whether the nodes get this installation, over ssh."""
    return THIS_INSTALLATION in install.split()


def node_requirements(install: str) -> list[str]:
    """What pip gets on a node; if drumline is copied to it, what that needs from a package
    index."""
    packages = other_packages(install)
    if not copies_drumline(install):
        return packages

    names = {name_of(word) for word in packages}
    return [word for word in third_party_requirements() if name_of(word) not in names] + packages


def other_packages(install: str) -> list[str]:
    """Those beside this installation."""
    return [word for word in install.split() if word != THIS_INSTALLATION]


def name_of(word: str) -> str:
    """The distribution that a requirement names, by itself or by the name of a wheel; or that a
    folder holds; empty: none."""
    path = word.partition("[")[0]
    if named := NAMED.match(word):
        name = named[1]
    elif path.endswith(".whl"):
        name = path.rpartition("/")[2].partition("-")[0]
    else:
        name = _project_name(Path(path))

    return re.sub(r"[-_.]+", "-", name).lower()


def _project_name(folder: Path) -> str:
    """What the pyproject.toml of a folder calls it; empty: there is none."""
    try:
        document = read_toml(folder / "pyproject.toml")
    except (OSError, ValueError):
        return ""
    return str(document.get("project", {}).get("name", ""))


def wrong_install(install: str, *, copies_folder: bool) -> Iterator[str]:
    """The first mistake. `copies_folder`: nodes get this folder before they install anything."""
    words = install.split()
    packages = other_packages(install)
    local = [word for word in packages if LOCAL.fullmatch(word)]
    unpinned = [word for word in packages if word not in local and not PINNED.fullmatch(word)]
    if any(map(CREDENTIALS.search, words)):
        yield "--install: an address has a user, a password or options, which every node would show; give one without"
    elif not words or not all(map(REQUIREMENT.fullmatch, words)):
        yield f"--install: {install!r} is not a list of requirements of pip without markers and quotes"
    elif unpinned:
        yield f"--install: {unpinned[0]!r} is not pinned; write NAME==VERSION, a wheel, or git+URL@ with a whole commit"
    elif local and not copies_folder:
        yield f"--install: {local[0]!r} is of this machine; give the URL at which the nodes find it"
    else:
        yield from _wrong_source(packages, is_copied=copies_drumline(install))
        for word in local:
            path = Path(word.partition("[")[0])
            if path.is_absolute() or ".." in path.parts or not path.exists():
                yield f"--install: {path} is not in this folder, which is all that the nodes get"


def _wrong_source(packages: list[str], *, is_copied: bool) -> Iterator[str]:
    """Drumline must come from somewhere, and from no package index."""
    for word in packages:
        named = NAMED.match(word)
        if named and named[3] == "==" and name_of(word) in OUR_NAMES:
            yield (
                f"--install: {word!r} asks a package index, and none has it: whoever takes that name could run code on "
                f"the nodes; write {THIS_INSTALLATION} for this installation, or NAME@URL"
            )
            return

    if not is_copied and THIS_INSTALLATION not in map(name_of, packages):
        yield (
            f"--install: without {THIS_INSTALLATION} the nodes cannot train; add {THIS_INSTALLATION} for this "
            "installation, or NAME@URL"
        )
