"""Nested values with tensors in them, as optimizers keep them, to JSON and named tensors; and back.

JSON has neither tensors nor tuples nor keys that are numbers; each of these is written as an object
with one marked field. What comes back is equal to what went in, types included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from drumline.errors import CheckpointError
from drumline.untrusted import MAX_BITS


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON of a value called `name`; the tensors in it are put into `tensors` under names below it."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CheckpointError(
            f"{name} cannot be saved: it is an integer of {value.bit_length():,} bits",
            next_step=f"keep it in a tensor, or in integers of up to {MAX_BITS} bits",
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": encode(list(value), name, tensors)}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, encode(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    raise CheckpointError(
        f"{name} cannot be saved: it is a {type(value).__name__}",
        next_step="keep tensors, numbers, text, lists, tuples and dicts in it; a checkpoint holds no pickles",
    )


def decode(value: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The value that `encode` was given; `tensor_of` finds a tensor by its name."""
    if isinstance(value, list):
        return [decode(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor_of(content)
    if kind == "tuple":
        return tuple(decode(content, tensor_of))
    return {key: decode(item, tensor_of) for key, item in content}
