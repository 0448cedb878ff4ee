"""A TOML file of settings (`--config run.toml`): its sections are those of the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.config.fields import FIELDS, SECTIONS
from drumline.config.layer import Layer, Setting, check_layer
from drumline.config.suggest import unknown_section
from drumline.config.values import show
from drumline.untrusted import TEXT_BYTES, parse_toml, read_regular

# Of a line without the spaces at its start; neither may try two ways to read the same spaces.
HEADER = re.compile(r"\[\[?([^\[\]]+)\]")
KEY = re.compile(r"([\w.\-\"' \t]+)=")


def read_file(path: Path) -> Layer:
    """The settings that a TOML file gives; never raises, problems are kept in the layer."""
    try:
        text = read_regular(path, most=TEXT_BYTES, follow_links=True).decode("utf-8-sig")
    except FileNotFoundError:
        return _unreadable(f"{path}: there is no such file (looked in {Path.cwd()})")
    except OSError as error:
        return _unreadable(f"{path}: cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return _unreadable(f"{path}: is not UTF-8 text (byte {error.start})")
    try:
        document = parse_toml(text)
    except ValueError as error:
        return _unreadable(f"{path}: is not valid TOML: {error}")
    return _read_document(document, _Places(path, text))


def _unreadable(problem: str) -> Layer:
    # Nobody knows what the file would have set, so no rule may complain that something is missing.
    return Layer({}, (problem,), broken=frozenset(FIELDS))


def _read_document(document: Mapping[str, Any], places: _Places) -> Layer:
    problems = []
    settings: list[Setting] = []
    for section, content in document.items():
        if section in SECTIONS and isinstance(content, dict):
            settings += _settings(section, content, places)
        elif section in SECTIONS:
            problems.append(
                f"{places.of(section)}: {section} = {show(content)} is not a section; write [{section}]"
            )
        elif isinstance(content, dict):
            problems.append(f"{places.of(section)}: {section}: {unknown_section(section)}")
        else:
            settings.append(Setting(section, content, places.of(section)))
    layer = check_layer(settings)
    return Layer(layer.settings, (*problems, *layer.problems), layer.broken)


def _settings(section: str, content: Mapping[str, Any], places: _Places) -> Iterator[Setting]:
    """The settings of a section; those of a table inside it one by one, so that each has its own line."""
    for key, value in content.items():
        path = f"{section}.{key}"
        if isinstance(value, dict) and path in FIELDS and FIELDS[path].is_table:
            yield from _settings(path, value, places)
        else:
            yield Setting(path, value, places.of(path))


class _Places:
    """Line numbers of keys. tomllib does not tell them; they are looked for in the text, as well as that goes."""

    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        self.lines: dict[str, int] = {}
        section = ""
        for number, line in enumerate(map(str.lstrip, text.splitlines()), start=1):
            if header := HEADER.match(line):
                section = _plain(header[1])
                self.lines.setdefault(section, number)
            elif key := KEY.match(line):
                self.lines.setdefault(".".join(filter(None, (section, _plain(key[1])))), number)

    def of(self, path: str) -> str:
        """`run.toml:3`; the line of the section where a key stands in an inline table."""
        number = self.lines.get(path) or self.lines.get(path.rpartition(".")[0])
        return f"{self.file}:{number}" if number else f"{self.file}"


def _plain(key: str) -> str:
    return re.sub(r"[\"' \t]", "", key)
