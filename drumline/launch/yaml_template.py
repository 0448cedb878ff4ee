"""Renders the YAML files that people apply with other tools: templates beside the code, with every
value in JSON's quotes, which YAML reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def render_yaml(template: str, **values: Any) -> str:
    """The text of a template of this folder, without blank lines."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - YAML, no HTML
        loader=FileSystemLoader(_HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quoted"] = json.dumps
    environment.filters["literal"] = _literal
    lines = environment.get_template(template).render(values).splitlines()
    return "".join(f"{line}\n" for line in lines if line.strip())


def _literal(word: str) -> str:
    """Kubernetes reads `$(X)` as a variable and `$$` as `$`."""
    return word.replace("$", "$$")
