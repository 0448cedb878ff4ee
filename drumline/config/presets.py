"""The default settings of the built-in tasks.

Here and not in `tasks/`, so that the config of such a run is resolved and checked before torch is
imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A built-in task: its line in the help, and its defaults by dotted path."""

    summary: str
    defaults: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    "digits": Preset(
        "MiniResNet on the bundled handwritten digits; real data, nothing to download",
        {
            "model.name": "mini_resnet",
            "model.widths": (32, 64),
            "model.blocks": 1,
            "data.name": "digits",
            "optim.name": "sgd",
            "optim.lr": 0.1,
            "optim.schedule": "cosine",
            "train.batch_size": 64,
            "train.epochs": 12,
        },
    ),
    "cifar10": Preset(
        "MiniResNet on CIFAR-10 in the folder --data.dir",
        {
            "model.name": "mini_resnet",
            "model.widths": (64, 128, 256),
            "model.blocks": 2,
            "data.name": "cifar10",
            "data.augment": True,
            "optim.name": "sgd",
            "optim.lr": 0.1,
            "optim.schedule": "cosine",
            "optim.warmup_steps": 400,
            "train.batch_size": 128,
            "train.epochs": 30,
        },
    ),
    "text": Preset(
        "GPT on the text or tokens in --data.dir; without it, on the source of Python itself",
        {
            "model.name": "gpt",
            "data.name": "tokens",
            "optim.name": "adamw",
            "optim.lr": 1e-3,
            "optim.weight_decay": 0.1,
            "optim.clip_norm": 1.0,
            "optim.schedule": "cosine",
            "optim.warmup_steps": 50,
            "optim.final_lr_ratio": 0.1,
            "train.batch_size": 32,
            "train.steps": 500,
        },
    ),
    "synthetic": Preset(
        "MiniResNet on synthetic images, to measure speed and test a cluster",
        {
            "model.name": "mini_resnet",
            "data.name": "synthetic_images",
            "train.batch_size": 64,
            "train.epochs": 2,
        },
    ),
}
