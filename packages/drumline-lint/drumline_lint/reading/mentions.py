"""Which Python files the texts of a repository name: READMEs, scripts, settings, notebooks, and
programs that start others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from drumline_lint.reading.parse import Reading
from drumline_lint.reading.source import Source

_ENDING = re.compile(rb"\.py\b")
_STEM = re.compile(rb"[\w-]+\Z")
_LONGEST_STEM = 80
_MODULE = re.compile(rb"-m[ =]+([\w.]+)")
_ENTRY_POINT = re.compile(rb"[\"'=] *([\w.]+):\w+ *[\"'\n]")
"""`train = "package.train:main"`, under `[project.scripts]` or `console_scripts`."""
_STARTING = (b"subprocess", b"os.system", b"Popen", b"submitit", b"runpy", b"console_scripts")


def mentioned_files(readings: Sequence[Reading]) -> frozenset[str]:
    """The names of files without `.py`, and the paths of modules: `train`, `package/train`."""
    return frozenset(name for reading in readings for name in _names_in(reading))


def is_mentioned(path: Path, mentioned: frozenset[str]) -> bool:
    parts = path.with_suffix("").parts
    return any("/".join(parts[number:]) in mentioned for number in range(len(parts)))


def _names_in(reading: Reading) -> Iterator[str]:
    content = reading.content
    is_program = isinstance(content, Source) and not content.is_notebook
    if is_program and not any(word in reading.data for word in _STARTING):
        return

    for ending in _ENDING.finditer(reading.data):
        before = reading.data[max(0, ending.start() - _LONGEST_STEM) : ending.start()]
        stem = _STEM.search(before)
        name = stem[0].decode(errors="replace") if stem else ""
        if name and not (is_program and name == reading.path.stem):
            yield name

    modules = _MODULE.findall(reading.data)
    if b"scripts" in reading.data:
        modules += _ENTRY_POINT.findall(reading.data)
    for module in modules:
        yield module.decode(errors="replace").replace(".", "/")
