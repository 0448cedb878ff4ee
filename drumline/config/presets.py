"""The built-in tasks, as in presets.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    summary: str
    defaults: Mapping[str, Any]
    """By dotted path."""


PRESETS: Mapping[str, Preset] = {
    name: Preset(**preset)
    for name, preset in tomllib.loads(
        Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    ).items()
}
