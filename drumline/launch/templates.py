"""Renders the texts that are mostly words: YAML that people apply with other tools, and the plan of a
cluster. The templates lie beside the code."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.base.text import join_names, plural

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


def fill(template: str, **values: Any) -> str:
    """The text of a template of this folder."""
    return _environment().get_template(template).render(values)


def render(template: str, **values: Any) -> str:
    """The same without blank lines. For YAML, `quoted` puts a value in JSON's quotes, which YAML
    reads."""
    lines = fill(template, **values).split("\n")
    return "".join(f"{line}\n" for line in lines if line.strip())


@functools.cache
def _environment() -> Environment:
    """Where the templates lie, and the filters that they use."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - no HTML
        loader=FileSystemLoader(_HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = quoted
    environment.filters["literal"] = _literal
    environment.filters["commented"] = _commented
    environment.globals |= {"plural": plural, "join_names": join_names}
    return environment


def quoted(value: Any) -> str:
    """JSON that YAML reads as the same: it has no pairs of surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", _escaped, text)


def _escaped(character: re.Match[str]) -> str:
    number = ord(character[0])
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


def _commented(text: str) -> str:
    """The text of a comment in YAML, which takes more characters for the end of a line than `\\n`."""
    return "\n# ".join(text.splitlines())


def _literal(word: str) -> str:
    """Kubernetes reads `$(X)` as a variable and `$$` as `$`."""
    return word.replace("$", "$$")
