"""The networks that come with Drumline, and the registry that a user's own models join."""

from __future__ import annotations

from drumline.models.gpt import GPT
from drumline.models.mini_resnet import MiniResNet
from drumline.models.registry import build, register

__all__ = ["GPT", "MiniResNet", "build", "register"]
