"""From all sources of settings to one Config: flags > file > environment > the task's defaults >
the schema's.

Two stages, because a task of the user's own imports torch: `check_layers` finds what can be found
before that, `resolve` adds the task's defaults and finds the rest. Both raise one ConfigError that
lists every problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from drumline.base.errors import ConfigError
from drumline.config.config_file import read_config_file
from drumline.config.fields import (
    FIELDS,
    SECTIONS,
    TASK_SECTION,
    Field,
    Mismatch,
    is_in_task,
    name_in_task,
)
from drumline.config.flags import (
    SCHEMA_DEFAULT,
    Flags,
    Layer,
    Setting,
    cannot_be_turned_off,
    check_layer,
    missing_value,
)
from drumline.config.rules import EXCLUDED_BY, broken_rules, pairs_given_together
from drumline.config.schema import Config

DATASET_DIR = "DATASET_DIR"
DEFAULTS = Layer(
    {path: Setting(path, field.default, SCHEMA_DEFAULT) for path, field in FIELDS.items()}
)
HOW_TO_DECLARE = (
    "a setting is an attribute of the class with a type and a default, such as `width: int = 64`; its type is int, "
    "float, bool, str, a Literal of texts, a tuple of one of them, or one of these | None"
)
NEXT_STEP = "`drumline train --help` lists every setting with its type, bounds and default"


class Layers(NamedTuple):
    """What the user gave, the highest precedence first."""

    flags: Layer
    file: Layer
    environment: Layer


def read_layers(
    flags: Flags, *, config_file: Path | str | None, environment: Mapping[str, str]
) -> Layers:
    """Read every source of settings but the task; never raises: `check_layers` or `resolve` reports
    all problems."""
    file = Layer({}) if config_file is None else read_config_file(Path(config_file))
    folder = environment.get(DATASET_DIR)  # an empty variable counts as not set
    variables = [Setting("data.dir", folder, where=DATASET_DIR, is_text=True)] if folder else []
    return Layers(flags.layer, file, check_layer(variables))


def check_layers(layers: Layers) -> None:
    """Stage 1, before the user's code is imported: report mistakes that do not depend on the task's
    defaults."""
    _raise_problems(layers, _settle(layers))


def resolve(
    layers: Layers,
    task_defaults: Mapping[str, Any],
    *,
    task: str = "task",
    task_fields: Mapping[str, Field] = MappingProxyType({}),
) -> Config:
    """Stage 2: the config of the run. `task` names the task in messages about its defaults;
    `task_fields`: its own settings."""
    task_layer = check_layer(
        Setting(path, value, f"{task}.defaults") for path, value in task_defaults.items()
    )
    field_defaults = Layer(
        {path: Setting(path, field.default, where=task) for path, field in task_fields.items()}
    )
    strongest_first = [
        *(
            check_layer(
                layer.settings.values(),
                problems=layer.problems,
                broken=layer.broken,
                check=partial(_checked, fields=task_fields, task=task),
            )
            for layer in (*layers, task_layer, field_defaults)
        ),
        DEFAULTS,
    ]
    settled = _settle(strongest_first)
    _raise_problems(strongest_first, settled)
    return _build(settled, {name_in_task(path): settled[path].value for path in task_fields})


def _checked(setting: Setting, *, fields: Mapping[str, Field], task: str) -> Setting:
    """A setting of the task itself with its value checked; any other as it is."""
    path = setting.path
    value = setting.value
    if not is_in_task(path):
        return setting
    if path not in fields:
        raise Mismatch(f"{setting.name}: unknown setting; {_hint(path, fields, task)}")

    annotation = fields[path].annotation
    if setting.is_text and annotation is not bool:
        if value is True:
            raise Mismatch(missing_value(setting.where, annotation))
        if setting.where == f"--no-{path}":
            raise Mismatch(cannot_be_turned_off(setting.where, path, annotation))

    if annotation is str and value == "":  # a user's own text may be empty
        return setting
    return replace(setting, is_text=setting.is_text and value is not True).coerced(annotation)


def _hint(path: str, fields: Mapping[str, Field], task: str) -> str:
    if not fields:
        return f"{task} has no settings of its own; {HOW_TO_DECLARE}"
    if near := difflib.get_close_matches(name_in_task(path), map(name_in_task, fields), n=1):
        return f"did you mean '{TASK_SECTION}.{near[0]}'?"
    return f"{task} has {', '.join(fields)}; {HOW_TO_DECLARE}"


def check_section(section: str, values: Any) -> None:
    """Check the values of a section that was made in Python."""
    where = type(values).__name__
    layer = check_layer(
        Setting(f"{section}.{name}", value, where) for name, value in vars(values).items()
    )
    _raise_problems([layer], layer.settings)


def _settle(strongest_first: Iterable[Layer]) -> dict[str, Setting]:
    settled: dict[str, Setting] = {}
    for layer in strongest_first:
        new = {path: setting for path, setting in layer.settings.items() if path not in settled}
        settled |= new
        for path, excluded in EXCLUDED_BY.items():
            if path in new and new[path].value is not None:
                settled.setdefault(excluded, Setting(excluded, None, where=f"{path} is set"))
    return settled


def _raise_problems(layers: Sequence[Layer], settled: Mapping[str, Setting]) -> None:
    pairs = pairs_given_together(layers)
    at_fault = frozenset[str]().union(*pairs, *(layer.broken for layer in layers))
    problems = [problem for layer in layers for problem in layer.problems]
    broken = [*pairs.values(), *broken_rules(settled, besides=at_fault)]
    advice = [rule.fix for rule in broken]
    if problems:
        advice.append(NEXT_STEP)
    problems += [rule.problem for rule in broken]
    if problems:
        raise ConfigError(problems, next_step="; ".join(advice))


def _build(settled: Mapping[str, Setting], task: Mapping[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path, field in FIELDS.items():
        section, _, name = path.partition(".")
        values[section][name] = {} if field.is_table else settled[path].value

    for path in sorted(settled):
        section, name, *option = path.split(".", 2)
        if option and f"{section}.{name}" in FIELDS:
            values[section][name][option[0]] = settled[path].value

    sections = {section: cls(**values[section]) for section, cls in SECTIONS.items()}
    return Config(**sections, task=task)
