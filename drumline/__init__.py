"""Drumline takes a PyTorch training job from one process to many nodes.

Only the public names are here. They are imported when first used, so that `drumline --help` does
not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline.base.errors import DrumlineError
    from drumline.checkpoint.own_loop import Checkpoint
    from drumline.checkpoint.state import load_checkpoint
    from drumline.config.schema import Config, WatchConfig
    from drumline.data.dataset import BatchDataset, TwoPartDataset
    from drumline.data.loader import EvaluationLoader, Loader
    from drumline.data.sharding import Draws
    from drumline.training.manager import DDPManager
    from drumline.training.python_api import Result, load, train
    from drumline.training.tasks.base import Loss, Task
    from drumline.training.tasks.built_in import register_model
    from drumline.training.tasks.hook import Hook, Run
    from drumline.training.tasks.ready_hooks import EMA, EarlyStopping, LogSamples, Unfreeze

_HOMES = {
    "checkpoint.own_loop": ("Checkpoint",),
    "checkpoint.state": ("load_checkpoint",),
    "config.schema": ("Config", "WatchConfig"),
    "data.dataset": ("BatchDataset", "TwoPartDataset"),
    "data.loader": ("EvaluationLoader", "Loader"),
    "data.sharding": ("Draws",),
    "base.errors": ("DrumlineError",),
    "training.manager": ("DDPManager",),
    "training.python_api": ("Result", "load", "train"),
    "training.tasks.base": ("Loss", "Task"),
    "training.tasks.built_in": ("register_model",),
    "training.tasks.hook": ("Hook", "Run"),
    "training.tasks.ready_hooks": ("EMA", "EarlyStopping", "LogSamples", "Unfreeze"),
}
__all__ = [
    "EMA",
    "BatchDataset",
    "Checkpoint",
    "Config",
    "DDPManager",
    "Draws",
    "DrumlineError",
    "EarlyStopping",
    "EvaluationLoader",
    "Hook",
    "Loader",
    "LogSamples",
    "Loss",
    "Result",
    "Run",
    "Task",
    "TwoPartDataset",
    "Unfreeze",
    "WatchConfig",
    "load",
    "load_checkpoint",
    "register_model",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("drumline")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"drumline.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
