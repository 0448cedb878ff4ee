"""What a run is: the schema, and the way from flags, file and task defaults to one Config. Never imports torch."""

from __future__ import annotations

from drumline.config.flags import Flags, read_flags
from drumline.config.load import Layers, check_layers, read_layers, resolve
from drumline.config.presets import PRESETS, Preset
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
from drumline.config.write import to_toml

# `config.help` is imported by the verb that prints it: nobody else needs it.
__all__ = [
    "PRESETS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistConfig",
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
