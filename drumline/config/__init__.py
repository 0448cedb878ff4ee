"""Step 1 of a run: its settings, and the way from flags, file and task defaults to one Config. Never imports torch."""

from __future__ import annotations

from drumline.config.config_file import to_toml
from drumline.config.flags import Flags, FlagTable, read_flags
from drumline.config.presets import PRESETS, Preset
from drumline.config.resolve import Layers, check_layers, read_layers, resolve
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    WatchConfig,
)

# `config.help` is imported only by a verb that prints it.
__all__ = [
    "PRESETS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistConfig",
    "FlagTable",
    "Flags",
    "Layers",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "Preset",
    "TrainConfig",
    "WatchConfig",
    "check_layers",
    "read_flags",
    "read_layers",
    "resolve",
    "to_toml",
]
