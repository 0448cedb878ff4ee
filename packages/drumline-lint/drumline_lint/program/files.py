"""The given files: the index of each, which of them an import means, and which may call something of a name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from drumline_lint.program.indexing import make_index
from drumline_lint.program.tree import Index
from drumline_lint.reading.source import Source

_CALLED = re.compile(r"(\w+)\s*\(")


class Files:
    """All files that were given, before anything is known of what is in them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._indexes: dict[Source, Index] = {}
        self._modules: dict[tuple[str, Source], Source | None] = {}

    def index(self, source: Source) -> Index:
        """Of one file; made when it is first asked for."""
        found = self._indexes.get(source)
        if found is None:
            found = self._indexes[source] = make_index(source)
        return found

    @cached_property
    def calling(self) -> dict[str, list[Source]]:
        """The files that may call something of a name, without a look at their trees."""
        found = defaultdict(list)
        for source in self.sources:
            index = self._indexes.get(source)
            for name in set(_CALLED.findall(source.text)) if index is None else index.calls:
                found[name].append(source)
        return found

    def module(self, name: str, seen_from: Source) -> Source | None:
        """The given file that this import means; of several, the one nearest to who imports it."""
        key = (name, seen_from)
        if key not in self._modules:
            self._modules[key] = self._find_module(name, seen_from)
        return self._modules[key]

    def submodule(self, package: Source, name: str) -> Source | None:
        """The file of a package, given its `__init__.py`."""
        inner = package.path.parent / f"{name}.py"
        for source in self._by_file_name.get(name, ()):
            if source.path in (inner, package.path.parent / name / "__init__.py"):
                return source
        return None

    def _find_module(self, name: str, seen_from: Source) -> Source | None:
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        candidates = self._by_file_name.get(parts[-1]) if parts else None
        if not dots and not candidates:
            return None
        folders = list(seen_from.path.parents)
        if dots or not candidates:
            return self._module_in(folders[dots - 1], parts) if dots <= len(folders) else None
        for folder in folders:
            if found := self._module_in(folder, parts):
                return found
        fitting = [
            one for one in candidates if _ends_with(one.path, parts) and _is_beside(one.path, parts, folders)
        ]
        return max(fitting, key=lambda one: _shared(one.path, seen_from.path), default=None)

    def _module_in(self, folder: Path, parts: list[str]) -> Source | None:
        inner = folder.joinpath(*parts)
        by_path = self._by_path
        as_file = by_path.get(f"{inner}.py") if parts else None
        return as_file or by_path.get(str(inner / "__init__.py"))

    @cached_property
    def _by_path(self) -> dict[str, Source]:
        return {str(source.path): source for source in self.sources}

    @cached_property
    def _by_file_name(self) -> dict[str, list[Source]]:
        found = defaultdict(list)
        for source in self.sources:
            is_package = source.path.name == "__init__.py"
            found[source.path.parent.name if is_package else source.path.stem].append(source)
        return found


def package_of(name: str) -> str:
    """Where a module is: `a` of `a.b`, `..` of `..b`; nothing of what is outermost, or has dots alone."""
    package = name.rpartition(".")[0]
    inner = name.lstrip(".")
    dots = "." * (len(name) - len(inner))
    return "" if not inner else dots if "." not in inner else package


def _ends_with(path: Path, parts: list[str]) -> bool:
    own = [*path.parts[:-1]] if path.name == "__init__.py" else [*path.parts[:-1], path.stem]
    return own[-len(parts) :] == parts


def _is_beside(path: Path, parts: list[str], folders: list[Path]) -> bool:
    """Whether the folder that a module is found in is beside one of these, as `src` is."""
    module = path.parent if path.name == "__init__.py" else path
    return module.parents[len(parts) - 1].parent in folders


def _shared(one: Path, other: Path) -> int:
    """How many folders two paths have in common."""
    count = 0
    for left, right in zip(one.parts, other.parts, strict=False):
        if left != right:
            break
        count += 1
    return count
