"""Parses a file's bytes for the rules: Python, a notebook's Python, a script or a manifest.
Unreadable files become problems."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drumline_lint.findings import UNREADABLE, Finding, problem
from drumline_lint.reading.discovery import (
    DOCKERFILE_NAMES,
    DOCUMENT_NAMES,
    SHELL_SHEBANG,
    is_readme,
)
from drumline_lint.reading.manifest import Manifest, may_be_manifest, read_dockerfile, read_manifest
from drumline_lint.reading.notebook import read_notebook
from drumline_lint.reading.shell import Script, read_readme
from drumline_lint.reading.source import CANNOT_PARSE, Source, syntax_problem
from drumline_lint.untrusted import read_regular

MAX_BYTES = 64 << 20
"""The largest file: notebooks contain images."""
SHELL_SUFFIXES = frozenset({".sh", ".bash", ".sbatch", ".slurm", ".ksh", ".zsh"})


@dataclass
class Reading:
    """The result of reading one file."""

    path: Path
    data: bytes
    encoding: str = "utf-8"
    """With `-sig` if the file begins with a byte order mark."""
    content: Source | Script | Manifest | None = None
    problems: list[Finding] = field(default_factory=list)
    is_skipped: bool = False
    """Whether it is YAML that starts no training, a README, requirements, or Python that cannot be
    parsed."""
    readme: Script | None = None
    """The commands that a README shows; no rule checks them."""
    document: str | None = None
    """The text of settings in YAML or JSON, or of requirements; other files lead to it."""

    @property
    def scripts(self) -> Sequence[Script]:
        """What the rules for scripts read."""
        if isinstance(self.content, Manifest):
            return self.content.scripts
        return [self.content] if isinstance(self.content, Script) else []

    def parse(self) -> None:
        """Python is parsed only here, or where its tree is needed; what cannot be is a problem."""
        try:
            _ = self.content.tree if isinstance(self.content, Source) else None
        except CANNOT_PARSE as error:
            self.content = None
            self.problems.append(syntax_problem(error, self.path))


def read_file(path: Path) -> Reading:
    """Never raises because of the content, or because it cannot be opened. Python is not parsed."""
    try:
        data = read_regular(path, most=MAX_BYTES)
    except OSError as error:
        message = f"the file cannot be opened: {error.strerror or error}"
        return Reading(path, b"", problems=[problem(UNREADABLE, path, message)])

    return decode(path, data)


def read_bytes(path: Path, data: bytes) -> Reading:
    """The reading of a file with this content; Python is parsed."""
    reading = decode(path, data)
    reading.parse()
    return reading


def decode(path: Path, data: bytes) -> Reading:
    """As `read_bytes`, but Python is not parsed."""
    language = language_of(path, data)
    reading = Reading(path, data)

    if language == "notebook":
        reading.content, reading.problems = read_notebook(path, data)
    elif b"\0" in data and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        line = data[: data.index(b"\0")].count(b"\n") + 1
        message = "the file has null bytes, so it is not text"
        reading.problems.append(problem(UNREADABLE, path, message, line=line))
    elif language == "shell":
        _read_script(reading)
    elif language == "readme":
        reading.is_skipped = True
        reading.readme = read_readme(path, data.decode(errors="surrogateescape"))
    elif language == "document":
        reading.is_skipped = True
        reading.document = data.decode(errors="surrogateescape")
    elif language == "yaml":
        _read_yaml(reading)
    elif language == "dockerfile":
        reading.content = read_dockerfile(path, data.decode(errors="surrogateescape"))
    else:
        _read_python(reading)

    return reading


def language_of(path: Path, data: bytes) -> str:
    """By its ending, otherwise by its first line; Python if both are unknown."""
    if path.suffix == ".ipynb":
        return "notebook"
    if path.suffix in SHELL_SUFFIXES:
        return "shell"

    if is_readme(path):
        return "readme"
    if DOCUMENT_NAMES.fullmatch(path.name):
        return "document"

    if path.suffix in {".yaml", ".yml"}:
        return "yaml"
    if DOCKERFILE_NAMES.fullmatch(path.name):
        return "dockerfile"

    if path.suffix != ".py" and SHELL_SHEBANG.match(data[:200]):
        return "shell"

    return "python"


def _read_script(reading: Reading) -> None:
    """Any text is a script."""
    # A shell has no encoding, so bytes that are not UTF-8 are kept unchanged.
    if reading.data.startswith(b"\xef\xbb\xbf"):
        reading.encoding = "utf-8-sig"
    text = reading.data.decode(reading.encoding, errors="surrogateescape")
    reading.content = Script(reading.path, text)


def _read_yaml(reading: Reading) -> None:
    """A manifest, if it has containers that start a training; other YAML is only settings."""
    reading.is_skipped = True
    text = reading.data.decode("utf-8-sig", errors="surrogateescape")
    reading.document = text
    if not may_be_manifest(reading.data):
        return

    try:
        manifest = read_manifest(reading.path, text)
    except ValueError as error:
        # The templates of Helm and the like are not YAML yet.
        if "{{" not in text and "{%" not in text:
            message = f"the YAML cannot be parsed: {error}"
            reading.problems.append(problem(UNREADABLE, reading.path, message))
        return

    if manifest.scripts:
        reading.content = manifest
        reading.is_skipped = False


def _read_python(reading: Reading) -> None:
    """As Python itself does: by a byte order mark, or a comment in the first two lines."""
    line = 1
    try:
        reading.encoding = _encoding(reading.data)
        text = reading.data.decode(reading.encoding)
    except UnicodeDecodeError as error:
        line = reading.data[: error.start].count(b"\n") + 1
        byte = reading.data[error.start]
        message = f"the file is not {error.encoding}: byte 0x{byte:02x} cannot be decoded"
    except (SyntaxError, LookupError, UnicodeError) as error:
        message = f"the encoding of the file is not known: {error}"
    else:
        reading.content = Source(reading.path, text)
        return

    unreadable = problem(UNREADABLE, reading.path, message, line=line, fix="save it as UTF-8")
    reading.problems.append(unreadable)


def _encoding(data: bytes) -> str:
    """The encoding that Python reads it with."""
    try:
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError as error:
        # It declares none, so it must be UTF-8; the error names the invalid byte.
        if "missing" in str(error):
            data.decode()
        raise
