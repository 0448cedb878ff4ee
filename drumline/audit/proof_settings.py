"""The settings of the runs that are compared: the user's own, and what the proof sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.audit.kill_schedule import ProofOptions, too_few_steps
from drumline.config import Layers
from drumline.config.fields import FIELDS

# What the proof sets itself, and what the user gives instead.
OWN = {
    "train.steps": "--steps says how long to train here",
    "train.epochs": "--steps says how long to train here",
    "log.trace": "it is always on here",
    "log.display": "what the runs print goes to files here",
}
SAVES, WARM_UP = "checkpoint.every_steps", "optim.warmup_steps"
SAVE_EVERY = 2


def wrong_settings(layers: Layers, options: ProofOptions) -> Iterator[str]:
    """A sentence for each flag that the proof sets itself, or that contradicts it."""
    flags = layers.flags.settings
    yield from (f"--{path}: {reason}" for path, reason in OWN.items() if path in flags)
    if options.is_elastic and "train.exact" in flags and flags["train.exact"].value != "elastic":
        legs = ", ".join(map(str, options.worlds))
        given = flags["train.exact"].value
        yield f"--train.exact: {given} needs one number of ranks, and the legs have {legs}"


class ProofSettings:
    """The job's settings, and what is changed for the proof. `defaults` are those of the task."""

    def __init__(self, layers: Layers, defaults: Mapping[str, Any], options: ProofOptions) -> None:
        self._layers = layers
        self._defaults = defaults
        self._options = options

    def problems(self) -> Iterator[str]:
        """A sentence for each setting that the proof cannot work with."""
        every = self.changes().get(SAVES, self._value(SAVES))
        # The end of an epoch is saved too, but when that is is known only once the job runs.
        if "checkpoint.every_epochs" not in self._layers.flags.settings:
            yield from filter(None, [too_few_steps(self._options, first_save=every)])
        shards, most = self._value("train.shards"), max(self._options.worlds)
        if self._options.is_elastic and most > shards:
            yield f"--world: {most} ranks cannot share {shards} shards (train.shards): some would have none"

    def changes(self) -> dict[str, Any]:
        """Settings that are changed because the proof would be impossible or refused; flags are never changed."""
        changes: dict[str, Any] = {}
        steps, saves = self._options.steps, self._value(SAVES)
        is_given = SAVES in self._layers.flags.settings
        if saves == 0 or (not is_given and too_few_steps(self._options, first_save=saves)):
            changes[SAVES] = SAVE_EVERY
        if WARM_UP not in self._layers.flags.settings and self._value(WARM_UP) > steps:
            changes[WARM_UP] = steps // 2
        return changes

    def describe_changes(self) -> str:
        """`checkpoint.every_steps 2 (it was 0)`."""
        changes = self.changes().items()
        return ", ".join(f"{path} {value} (it was {self._value(path)})" for path, value in changes)

    def arguments(self, task: str, *, config_file: str | None) -> list[str]:
        """The arguments of `drumline train`, without the folder and the number of ranks."""
        given = {path: setting.value for path, setting in self._layers.flags.settings.items()}
        fixed = {"train.steps": self._options.steps, "log.trace": True, "log.display": "none"}
        elastic = {"train.exact": "elastic"} if self._options.is_elastic else {}
        settings = {**given, **self.changes(), **fixed, **elastic}
        flags = [f"--{path}={_as_text(value)}" for path, value in settings.items()]
        return [task, *([f"--config={config_file}"] if config_file else []), *flags]

    def _value(self, path: str) -> Any:
        for layer in self._layers.strongest_first():
            if path in layer.settings:
                return layer.settings[path].value
        return self._defaults.get(path, FIELDS[path].default)


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_as_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
