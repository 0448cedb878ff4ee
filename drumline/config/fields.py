"""The settings as a flat table, by dotted path (`optim.lr`): what the schema says, in a form that can be looked up.

Everything else in this room (flags, files, rules, help) works on this table, so a field is added in schema.py alone.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from drumline.config.schema import Config


@dataclass(frozen=True)
class Field:
    """One setting: where it stands, what it may hold, and what it holds when nobody sets it."""

    path: str
    annotation: Any
    default: Any

    @property
    def is_table(self) -> bool:
        """Whether it holds named options of the user's own, each set by itself."""
        return get_origin(self.annotation) is collections.abc.Mapping


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _fields_of(section: str, cls: type[Any]) -> dict[str, Field]:
    hints = get_type_hints(cls, include_extras=True)
    paths = {f"{section}.{field.name}": field for field in dataclasses.fields(cls)}
    return {path: Field(path, hints[field.name], _default_of(field)) for path, field in paths.items()}


SECTIONS: Mapping[str, type[Any]] = get_type_hints(Config)
"""The dataclass of each section, in the order of the schema."""

FIELDS: Mapping[str, Field] = {
    path: field for section, cls in SECTIONS.items() for path, field in _fields_of(section, cls).items()
}
"""Every setting, in the order of the schema."""


def annotation_of(path: str) -> Any | None:
    """The type of a setting, or of one option inside a table (`model.options.hidden`); None: no such setting."""
    if path in FIELDS:
        return FIELDS[path].annotation
    for table in (field for field in FIELDS.values() if field.is_table):
        if path.startswith(f"{table.path}."):
            return get_args(table.annotation)[1]
    return None


def values_of(config: Config) -> dict[str, Any]:
    """A config as a flat mapping of dotted paths, in the order of the schema."""
    return {
        path: getattr(getattr(config, section), name)
        for path in FIELDS
        for section, _, name in [path.partition(".")]
    }


def docs() -> dict[str, str]:
    """The docstring under each field, as one line. Python does not keep these, so the source is read."""
    import ast  # only help needs this

    from drumline.config import schema

    written: dict[str, str] = {}
    section_of = {cls.__name__: section for section, cls in SECTIONS.items()}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef) or node.name not in section_of:
            continue
        for field, doc in zip(node.body, node.body[1:], strict=False):
            match field, doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    written[f"{section_of[node.name]}.{name}"] = " ".join(text.split())
    return written
