"""The built-in networks, and the registry of models."""

from __future__ import annotations

from drumline.models.gpt import GPT
from drumline.models.mini_resnet import MiniResNet
from drumline.models.model_registry import build_model, register_model

__all__ = ["GPT", "MiniResNet", "build_model", "register_model"]
