"""The built-in networks, and the registry of models."""

from __future__ import annotations

from drumline.training.models.gpt import GPT
from drumline.training.models.mini_resnet import MiniResNet
from drumline.training.models.model_registry import build_model, register_model

__all__ = ["GPT", "MiniResNet", "build_model", "register_model"]
