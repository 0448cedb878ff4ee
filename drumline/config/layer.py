"""One source of settings (the flags, the file, the environment, a task), checked as far as it can be by itself.

A layer continues after a problem, so that all of them are reported at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drumline.config.fields import FIELDS, annotation_of, nearest, unknown_setting
from drumline.config.values import Mismatch, from_text, from_value, show

EXCLUSIVE_PAIRS = (("train.batch_size", "train.batch_size_per_rank"), ("train.epochs", "train.steps"))
"""Two ways to set one thing. Across layers the stronger layer's one replaces the other."""

SCHEMA_DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A value for a setting, and where it comes from: `--optim.lr`, `run.toml:3`, `DATASET_DIR`, `MyTask.defaults`."""

    path: str
    value: Any
    where: str
    is_text: bool = False
    """Given as a command-line string, by a flag or variable that names the setting."""

    def coerced(self, annotation: Any) -> Setting:
        """The same, with a value of the right type; raises Mismatch with the whole message."""
        try:
            value = (from_text if self.is_text else from_value)(annotation, self.value)
        except Mismatch as mismatch:
            raise Mismatch(f"{self.name}{':' if self.is_text else ' ='} {mismatch}") from None
        return replace(self, value=value)

    @property
    def name(self) -> str:
        """How a message about it begins."""
        return self.where if self.is_text else f"{self.where}: {self.path}"


@dataclass(frozen=True)
class Layer:
    """The settings of one source that are right, and the problems with the others."""

    settings: Mapping[str, Setting]
    problems: tuple[str, ...] = ()
    broken: frozenset[str] = frozenset()
    """Settings that the user tried to give: their problem is reported already, so no rule checks them."""


def check_layer(given: Iterable[Setting], *, besides: Collection[str] = ()) -> Layer:
    """Check names, types, bounds and exclusive pairs. `besides`: other names that may have been meant."""
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    broken: set[str] = set()
    for setting in _options_apart(given):
        try:
            settings[setting.path] = setting.coerced(_annotation(setting, besides))
        except Mismatch as mismatch:
            problems.append(str(mismatch))
            broken.update((setting.path, *nearest(setting.path)))
    for pair in EXCLUSIVE_PAIRS:
        both = [settings[path] for path in pair if path in settings and settings[path].value is not None]
        if len(both) == len(pair):
            problems.append(f"{' and '.join(pair)} exclude each other, give one of them: {evidence(both)}")
            broken.update(pair)
    return Layer(settings, tuple(problems), frozenset(broken))


def evidence(settings: Iterable[Setting]) -> str:
    """The values behind a problem, and where each comes from; those not set are left out."""
    return ", ".join(
        f"{setting.path} = {show(setting.value)} ({setting.where})"
        for setting in settings
        if setting.where != SCHEMA_DEFAULT or setting.value is not None
    )


def _options_apart(given: Iterable[Setting]) -> Iterator[Setting]:
    """A table of options becomes one setting per option, so that layers can differ in some of them."""
    for setting in given:
        field = FIELDS.get(setting.path)
        if field is not None and field.is_table and isinstance(setting.value, Mapping):
            for option, value in setting.value.items():
                yield replace(setting, path=f"{setting.path}.{option}", value=value)
        else:
            yield setting


def _annotation(setting: Setting, besides: Collection[str]) -> Any:
    annotation = annotation_of(setting.path)
    if annotation is None:
        raise Mismatch(f"{setting.name}: {unknown_setting(setting.path, besides=besides)}")
    table = next((path for path in FIELDS if setting.path.startswith(f"{path}.")), None)
    option = setting.path.removeprefix(f"{table}.")
    if table is not None and not option.isidentifier():
        raise Mismatch(f"{setting.name}: {option!r} cannot be the name of a keyword argument")
    return annotation
