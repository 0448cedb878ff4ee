"""The settings of the runs that are compared: the user's own, and what the proof needs besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.config import PRESETS, Layers
from drumline.prove.schedule import Wishes

# What the proof sets itself, and what the user gives instead.
OWN = {
    "train.steps": "--steps says how long to train here",
    "train.epochs": "--steps says how long to train here",
    "log.trace": "it is always on here",
    "log.display": "what the runs print goes to files here",
}
SAVE_EVERY = 2


def wrong_settings(layers: Layers, wishes: Wishes) -> Iterator[str]:
    """A sentence for each flag that the proof has no use for."""
    flags = layers.flags.settings
    yield from (f"--{path}: {reason}" for path, reason in OWN.items() if path in flags)
    if wishes.is_elastic and "train.exact" in flags and flags["train.exact"].value != "elastic":
        legs = ", ".join(map(str, wishes.worlds))
        given = flags["train.exact"].value
        yield f"--train.exact: {given} keeps the bits on one number of ranks, and the legs have {legs}"


def train_arguments(task: str, layers: Layers, wishes: Wishes, *, config_file: str | None) -> list[str]:
    """What `drumline train` is given, less the folder and the number of ranks."""
    given = {path: setting.value for path, setting in layers.flags.settings.items()}
    settings = {**_needed(task, layers, wishes), **given, **_fixed(wishes)}
    flags = [f"--{path}={_as_text(value)}" for path, value in settings.items()]
    return [task, *([f"--config={config_file}"] if config_file else []), *flags]


def _fixed(wishes: Wishes) -> dict[str, Any]:
    elastic = {"train.exact": "elastic"} if wishes.is_elastic else {}
    return {"train.steps": wishes.steps, "log.trace": True, "log.display": "none", **elastic}


def _needed(task: str, layers: Layers, wishes: Wishes) -> dict[str, Any]:
    """What the user may set otherwise."""
    needed: dict[str, Any] = {"checkpoint.keep_last": wishes.steps}
    if _value("checkpoint.every_steps", task, layers) is None:
        needed["checkpoint.every_steps"] = SAVE_EVERY
    # A warm-up that is longer than the run is refused, and that of the user's own task is not known here.
    warmup = _value("optim.warmup_steps", task, layers, unknown=wishes.steps + 1)
    if warmup is not None and warmup > wishes.steps:
        needed["optim.warmup_steps"] = wishes.steps // 2
    return needed


def _value(path: str, task: str, layers: Layers, *, unknown: Any = None) -> Any:
    """What the flags, the file or a built-in task set; `unknown` for a task that is not loaded yet."""
    for layer in layers.strongest_first():
        if path in layer.settings:
            return layer.settings[path].value
    defaults: Mapping[str, Any] | None = PRESETS[task].defaults if task in PRESETS else None
    return unknown if defaults is None else defaults.get(path)


def _as_text(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple):
        return ",".join(map(_as_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
