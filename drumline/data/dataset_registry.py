"""Datasets by name: the built-in ones, and the user's own as `path/to/file.py:Class` or `package.module:Class`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drumline.data.image_files import ImageFolder, cifar10, digits
from drumline.data.synthetic import SyntheticImages, SyntheticTokens
from drumline.data.tokens import tokens
from drumline.errors import UsageError, did_you_mean
from drumline.user_code import build_accepted, is_class_spec, load_class

BUILDERS: dict[str, Callable[..., Any]] = {
    "digits": digits,
    "cifar10": cifar10,
    "image_folder": ImageFolder,
    "tokens": tokens,
    "synthetic_images": SyntheticImages,
    "synthetic_tokens": SyntheticTokens,
}


def build_dataset(name: str, **settings: Any) -> Any:
    """The dataset of that name, given those settings that it accepts."""
    if is_class_spec(name):
        builder: Callable[..., Any] = load_class(name)
    elif name in BUILDERS:
        builder = BUILDERS[name]
    else:
        raise UsageError(
            f"there is no dataset {name!r}; {did_you_mean(name, BUILDERS)}",
            next_step="name a built-in dataset, or your own as path/to/file.py:ClassName",
        )
    return build_accepted(builder, settings, options={}, what=f"the dataset {name}")
