"""A config as a TOML file: read with `--config run.toml`, and written to the run folder as
`config.toml`.

Every field is written, with "none" for what is not set, so that the file describes the same run
when it is read by a task or a later version with other defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.base.errors import did_you_mean
from drumline.base.untrusted import TEXT_BYTES, parse_toml, read_regular
from drumline.config.fields import FIELDS, SECTIONS, TASK_SECTION, flag_text, show_value
from drumline.config.flags import Layer, Setting, check_layer
from drumline.config.schema import REMOVED, Config

# For a line without leading spaces; neither pattern may match the same spaces in two ways, which
# would be slow.
_HEADER = re.compile(r"\[\[?([^\[\]]+)\]")
_KEY = re.compile(r"([\w.\-\"' \t]+)=")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
CLUSTER_SECTION = "aws"


def read_config_file(path: Path) -> Layer:
    """The settings in a TOML file; never raises, problems are kept in the layer."""
    try:
        text = read_regular(path, most=TEXT_BYTES, follow_links=True).decode("utf-8-sig")
        document = parse_toml(text)
    except FileNotFoundError:
        problem = f"there is no such file (looked in {Path.cwd()})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except ValueError as error:
        problem = f"is not valid TOML: {error}"
    else:
        return _read_document(document, _LineNumbers(path, text))

    # The file's settings are unknown, so no rule may report that something is missing.
    return Layer({}, (f"{path}: {problem}",), broken=frozenset(FIELDS))


def _read_document(document: Mapping[str, Any], lines: _LineNumbers) -> Layer:
    problems = []
    settings: list[Setting] = []
    sections = [*SECTIONS, TASK_SECTION]

    for section, content in document.items():
        # of `drumline aws`, which may have the same file
        if section == CLUSTER_SECTION:
            continue
        where = lines.of(section)
        if section in sections and isinstance(content, dict):
            settings += _settings(section, content, lines)
        elif section in sections:
            problems.append(
                f"{where}: {section} = {show_value(content)} is not a section; write [{section}]"
            )
        elif isinstance(content, dict):
            hint = did_you_mean(section, sections, known_as="the sections are")
            problems.append(f"{where}: {section}: unknown section; {hint}")
        else:
            settings.append(Setting(section, content, where))

    return check_layer(settings, problems=problems)


def _settings(section: str, content: Mapping[str, Any], lines: _LineNumbers) -> Iterator[Setting]:
    """The settings of a section; those of a table inside it one by one, so that each has its own
    line."""
    for key, value in content.items():
        path = f"{section}.{key}"
        if isinstance(value, dict) and path in FIELDS and FIELDS[path].is_table:
            yield from _settings(path, value, lines)
        elif path in REMOVED:
            for replacement, replacing_value in REMOVED[path].get(flag_text(value), {}).items():
                yield Setting(replacement, replacing_value, lines.of(path))
        else:
            yield Setting(path, value, lines.of(path))


class _LineNumbers:
    """Line numbers of keys, which tomllib does not report: searched for in the text, so not always
    found."""

    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        self.lines: dict[str, int] = {}
        section = ""
        for number, line in enumerate(map(str.lstrip, text.splitlines()), start=1):
            if header := _HEADER.match(line):
                section = _unquoted(header[1])
                self.lines.setdefault(section, number)
            elif key := _KEY.match(line):
                self.lines.setdefault(".".join(filter(None, (section, _unquoted(key[1])))), number)

    def of(self, path: str) -> str:
        """`run.toml:3`; the line of the section for a key of an inline table."""
        number = self.lines.get(path) or self.lines.get(path.rpartition(".")[0])
        return f"{self.file}:{number}" if number else f"{self.file}"


def _unquoted(key: str) -> str:
    return re.sub(r"[\"' \t]", "", key)


def to_toml(config: Config, *, header: str | None = None, left_out: Collection[str] = ()) -> str:
    """The whole config but for the settings in `left_out`, in the order of the schema; `header`
    becomes a comment at the top."""
    parts = ["\n".join(f"# {line}".rstrip() for line in header.splitlines())] if header else []
    for section in SECTIONS:
        values: dict[str, Any] = {}
        tables: dict[str, Mapping[str, Any]] = {}
        for name, value in vars(getattr(config, section)).items():
            path = f"{section}.{name}"
            if path in left_out:
                continue
            if FIELDS[path].is_table:
                tables[path] = value
            else:
                values[name] = value
        parts.append(_table(section, values))
        parts += [_table(path, table) for path, table in tables.items() if table]

    if config.task:
        parts.append(_table(TASK_SECTION, config.task))

    return "\n\n".join(parts) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> str:
    lines = (
        f"{key if _BARE_KEY.fullmatch(key) else _literal(key)} = {_literal(value)}"
        for key, value in values.items()
    )
    return "\n".join([f"[{name}]", *lines])


def _literal(value: Any) -> str:
    """As JSON: TOML writes numbers, booleans, lists and text in the same way, except for one
    character."""
    text = json.dumps("none" if value is None else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
