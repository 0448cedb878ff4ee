"""Drumline takes a PyTorch training job from one process to many nodes.

Only the public names are here. They are imported when first used, so that `drumline --help` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline.checkpoint.state import load_checkpoint
    from drumline.config.schema import Config, WatchConfig
    from drumline.data.dataset import BatchDataset, TwoPartDataset
    from drumline.data.draws import Draws
    from drumline.errors import DrumlineError
    from drumline.manager import DDPManager
    from drumline.models.model_registry import register_model
    from drumline.tasks.base import Loss, Task

_HOMES = {
    "BatchDataset": "drumline.data.dataset:BatchDataset",
    "Config": "drumline.config.schema:Config",
    "DDPManager": "drumline.manager:DDPManager",
    "Draws": "drumline.data.draws:Draws",
    "DrumlineError": "drumline.errors:DrumlineError",
    "Loss": "drumline.tasks.base:Loss",
    "Task": "drumline.tasks.base:Task",
    "TwoPartDataset": "drumline.data.dataset:TwoPartDataset",
    "WatchConfig": "drumline.config.schema:WatchConfig",
    "load_checkpoint": "drumline.checkpoint.state:load_checkpoint",
    "register_model": "drumline.models.model_registry:register_model",
}
__all__ = [
    "BatchDataset",
    "Config",
    "DDPManager",
    "Draws",
    "DrumlineError",
    "Loss",
    "Task",
    "TwoPartDataset",
    "WatchConfig",
    "load_checkpoint",
    "register_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
