"""Models by name: what `--model.name` may say, and how a name becomes a network.

The task calls `build` once at the start of a run. A user's model joins either by `@register("name")` in the
task's file or, without any registration, as `path/to/file.py:ClassName`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from drumline.errors import UsageError, did_you_mean
from drumline.user_code import build_accepted, is_class_spec, load_class

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

_builders: dict[str, Callable[..., nn.Module]] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Make a class or function that builds a model known under a name."""

    def remember(builder: Builder) -> Builder:
        if name in _builders:
            raise UsageError(
                f"two models are called {name!r}: {_described(_builders[name])} and {_described(builder)}",
                next_step="give one of them another name",
            )
        _builders[name] = builder
        return builder

    return remember


def build(
    name: str, *, facts: Mapping[str, Any], settings: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """The model called `name`.

    Of `facts` (what the data tells: channels, classes, vocabulary) and `settings` (what the config says) it is
    given those that its signature names; a fact wins over a setting. It must accept all of `options`, which win
    over both.
    """
    model = build_accepted(_find(name), {**settings, **facts}, options=options, what=f"model {name!r}")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} is a {type(model).__name__}, not a torch.nn.Module",
            next_step="name a class that derives from torch.nn.Module",
        )
    return model


def _find(name: str) -> Callable[..., nn.Module]:
    if is_class_spec(name):
        return load_class(name, nn.Module)
    if name not in _builders:
        raise UsageError(
            f"there is no model {name!r}; {did_you_mean(name, _builders)}",
            next_step="a model of your own is named path/to/file.py:ClassName",
        )
    return _builders[name]


def _described(builder: Callable[..., nn.Module]) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"
