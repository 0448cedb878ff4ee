"""Drumline takes a PyTorch training job from one process to many nodes.

Only the public names are here. They are imported when first used, so that `drumline --help` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumline.checkpoint.own_loop import Checkpoint
    from drumline.checkpoint.state import load_checkpoint
    from drumline.config.schema import Config, WatchConfig
    from drumline.data.dataset import BatchDataset, TwoPartDataset
    from drumline.data.draws import Draws
    from drumline.data.evaluation_loader import EvaluationLoader
    from drumline.data.loader import Loader
    from drumline.errors import DrumlineError
    from drumline.manager import DDPManager
    from drumline.models.model_registry import register_model
    from drumline.python_api import Result, load, train
    from drumline.tasks.base import Loss, Task
    from drumline.tasks.hook import Hook, Run
    from drumline.tasks.ready_hooks import EMA, EarlyStopping, LogSamples, Unfreeze

_HOMES = {
    "BatchDataset": "drumline.data.dataset:BatchDataset",
    "Checkpoint": "drumline.checkpoint.own_loop:Checkpoint",
    "Config": "drumline.config.schema:Config",
    "DDPManager": "drumline.manager:DDPManager",
    "Draws": "drumline.data.draws:Draws",
    "DrumlineError": "drumline.errors:DrumlineError",
    "EMA": "drumline.tasks.ready_hooks:EMA",
    "EarlyStopping": "drumline.tasks.ready_hooks:EarlyStopping",
    "EvaluationLoader": "drumline.data.evaluation_loader:EvaluationLoader",
    "Hook": "drumline.tasks.hook:Hook",
    "Loader": "drumline.data.loader:Loader",
    "LogSamples": "drumline.tasks.ready_hooks:LogSamples",
    "Loss": "drumline.tasks.base:Loss",
    "Result": "drumline.python_api:Result",
    "Run": "drumline.tasks.hook:Run",
    "Task": "drumline.tasks.base:Task",
    "TwoPartDataset": "drumline.data.dataset:TwoPartDataset",
    "Unfreeze": "drumline.tasks.ready_hooks:Unfreeze",
    "WatchConfig": "drumline.config.schema:WatchConfig",
    "load": "drumline.python_api:load",
    "load_checkpoint": "drumline.checkpoint.state:load_checkpoint",
    "register_model": "drumline.models.model_registry:register_model",
    "train": "drumline.python_api:train",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
