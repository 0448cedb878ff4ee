"""A resolved config as a TOML file: what is written to the run folder, and can be given back with `--config`.

Every field is written, with "none" for what is not set: given back to a task with other defaults, or to a later
version with other defaults, the file still describes the same run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drumline.config.fields import FIELDS, SECTIONS, values_of
from drumline.config.schema import Config

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
ESCAPES = {
    **{code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)},
    ord('"'): '\\"',
    ord("\\"): "\\\\",
}


def to_toml(config: Config, *, header: str | None = None) -> str:
    """The whole config, sections and fields in the order of the schema; `header` becomes a comment at the top."""
    values = values_of(config)
    comment = [f"# {line}".rstrip() for line in header.splitlines()] if header else []
    parts = ["\n".join(comment)] if comment else []
    for section in SECTIONS:
        paths = [path for path in FIELDS if path.startswith(f"{section}.")]
        tables = [path for path in paths if FIELDS[path].is_table and values[path]]
        plain = {path.partition(".")[2]: values[path] for path in paths if not FIELDS[path].is_table}
        parts.append(_table(section, plain))
        parts += [_table(path, values[path]) for path in tables]
    return "\n\n".join(parts) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in values.items())])


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return repr(value)


def _string(text: str) -> str:
    return f'"{text.translate(ESCAPES)}"'
