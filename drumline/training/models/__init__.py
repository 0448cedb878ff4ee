"""The built-in networks, and models by name: what `--model.name` accepts, and how a name becomes a
network.

A user's model is registered with `@drumline.register_model("name")` in the task's file or, without
any registration, named as `path/to/file.py:ClassName`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from drumline.base.errors import UsageError
from drumline.base.user_code import build_accepted, find_named
from drumline.training.models.gpt import GPT
from drumline.training.models.mini_resnet import MiniResNet

__all__ = ["GPT", "MiniResNet", "build_model", "register_model"]

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

_builders: dict[str, Callable[..., nn.Module]] = {"gpt": GPT, "mini_resnet": MiniResNet}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Register a class or function that builds a model under a name."""

    def decorate(builder: Builder) -> Builder:
        if name in _builders:
            names = (
                f"{function.__module__}.{function.__qualname__}"
                for function in (_builders[name], builder)
            )
            raise UsageError(
                f"two models are called {name!r}: {' and '.join(names)}",
                next_step="give one of them another name",
            )
        _builders[name] = builder
        return builder

    return decorate


def build_model(
    name: str, *, facts: Mapping[str, Any], settings: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """The model called `name`.

    It is given those `facts` of the data (channels, classes, vocabulary) and `settings` of the
    config that its signature names; a fact overrides a setting. It must accept all `options`, which
    override both.
    """
    builder = find_named("model", name, _builders, nn.Module)
    model = build_accepted(builder, {**settings, **facts}, options=options, what=f"model {name!r}")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} is a {type(model).__name__}, not a torch.nn.Module",
            next_step="name a class that derives from torch.nn.Module",
        )
    return model
