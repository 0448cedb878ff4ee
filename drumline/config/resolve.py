"""From all sources of settings to one Config: flags > file > environment > the task's defaults > the schema's.

Two stages, because a task of the user's own imports torch: `check_layers` finds what can be found before that,
`resolve` adds the task's defaults and finds the rest. Both raise one ConfigError that lists every problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from drumline.config.config_file import read_file
from drumline.config.fields import FIELDS, SECTIONS
from drumline.config.flags import Flags
from drumline.config.layer import EXCLUSIVE_PAIRS, SCHEMA_DEFAULT, Layer, Setting, check_layer
from drumline.config.rules import broken_rules
from drumline.config.schema import Config
from drumline.errors import ConfigError

ENVIRONMENT_VARIABLES = {"DATASET_DIR": "data.dir"}
DEFAULTS = Layer({path: Setting(path, field.default, SCHEMA_DEFAULT) for path, field in FIELDS.items()})
NEXT_STEP = "`drumline train --help` lists every setting with its type, bounds and default"


@dataclass(frozen=True)
class Layers:
    """What the user gave, strongest first."""

    flags: Layer
    file: Layer
    environment: Layer

    def strongest_first(self) -> tuple[Layer, ...]:
        return (self.flags, self.file, self.environment)


def read_layers(flags: Flags, *, config_file: Path | None, environment: Mapping[str, str]) -> Layers:
    """Read every source of settings but the task; never raises: `check_layers` or `resolve` reports all problems."""
    return Layers(
        flags=flags.layer,
        file=Layer({}) if config_file is None else read_file(config_file),
        environment=_read_environment(environment),
    )


def check_layers(layers: Layers) -> None:
    """Stage 1, before any code of the user is imported: what is wrong whatever the task's defaults are."""
    _raise_problems(layers.strongest_first(), _settle(layers.strongest_first()))


def resolve(layers: Layers, task_defaults: Mapping[str, Any], *, task: str = "task") -> Config:
    """Stage 2: the config of the run. `task` names the task in messages about its defaults."""
    where = f"{task}.defaults"
    of_task = check_layer(Setting(path, value, where) for path, value in task_defaults.items())
    everything = (*layers.strongest_first(), of_task, DEFAULTS)
    settled = _settle(everything)
    _raise_problems(everything, settled)
    return _build(settled)


def check_section(section: str, values: Any) -> None:
    """Check the values of a section that was made in Python."""
    where = type(values).__name__
    given = check_layer(
        Setting(f"{section}.{field.name}", getattr(values, field.name), where) for field in fields(values)
    )
    _raise_problems([given], given.settings)


def _read_environment(environment: Mapping[str, str]) -> Layer:
    return check_layer(
        Setting(path, environment[variable], where=variable, is_text=True)
        for variable, path in ENVIRONMENT_VARIABLES.items()
        if environment.get(variable)  # an empty variable counts as none
    )


def _settle(strongest_first: Iterable[Layer]) -> dict[str, Setting]:
    settled: dict[str, Setting] = {}
    for layer in strongest_first:
        new = {path: setting for path, setting in layer.settings.items() if path not in settled}
        settled |= new
        for path, other in (pair[::order] for pair in EXCLUSIVE_PAIRS for order in (1, -1)):
            if path in new and new[path].value is not None:
                settled.setdefault(other, Setting(other, None, where=f"{path} is set"))
    return settled


def _raise_problems(layers: Sequence[Layer], settled: Mapping[str, Setting]) -> None:
    at_fault = frozenset[str]().union(*(layer.broken for layer in layers))
    problems = [problem for layer in layers for problem in layer.problems]
    problems += broken_rules(settled, besides=at_fault)
    if problems:
        raise ConfigError(problems, next_step=NEXT_STEP)


def _build(settled: Mapping[str, Setting]) -> Config:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, field in FIELDS.items():
        section, _, name = path.partition(".")
        if field.is_table:
            options = sorted(option for option in settled if option.startswith(f"{path}."))
            value: Any = {option.removeprefix(f"{path}."): settled[option].value for option in options}
        else:
            value = settled[path].value
        values[section][name] = value
    return Config(**{section: cls(**values[section]) for section, cls in SECTIONS.items()})
