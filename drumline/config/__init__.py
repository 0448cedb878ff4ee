"""Step 1 of a run: its settings, merged from flags, file and task defaults into one Config. Never
imports torch."""

from __future__ import annotations

from drumline.config.flags import Flags, FlagTable, FlagValues, read_flags, switch
from drumline.config.presets import PRESETS
from drumline.config.resolve import Layers, check_layers, read_layers, resolve

# Settings themselves are in `config.schema`; `config.help` is imported only by a verb that prints
# it.
__all__ = [
    "PRESETS",
    "FlagTable",
    "FlagValues",
    "Flags",
    "Layers",
    "check_layers",
    "read_flags",
    "read_layers",
    "resolve",
    "switch",
]
