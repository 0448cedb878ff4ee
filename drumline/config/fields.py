"""The settings as a flat table, by dotted path (`optim.lr`), and what a misspelt path probably means.

The rest of this room (flags, files, rules, help) works on this table, so a field is added in schema.py alone.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from drumline.config.schema import Config


@dataclass(frozen=True)
class Field:
    """One setting: its path, its type, and its default."""

    path: str
    annotation: Any
    default: Any

    @property
    def is_table(self) -> bool:
        """Whether it holds named options of the user's own, each set by itself."""
        return get_origin(self.annotation) is collections.abc.Mapping


def _fields_of(section: str, cls: type[Any]) -> dict[str, Field]:
    hints = get_type_hints(cls, include_extras=True)
    defaults = vars(cls())
    paths = {f"{section}.{field.name}": field.name for field in dataclasses.fields(cls)}
    return {path: Field(path, hints[name], defaults[name]) for path, name in paths.items()}


SECTIONS: Mapping[str, type[Any]] = get_type_hints(Config)
"""The dataclass of each section, in the order of the schema."""

FIELDS: Mapping[str, Field] = {
    path: field for section, cls in SECTIONS.items() for path, field in _fields_of(section, cls).items()
}
"""Every setting, in the order of the schema."""

# Names from other tools, where spelling alone is too far from ours to be recognized.
OTHER_NAMES: Mapping[str, str] = {
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "optim": "optim.name",
    "scheduler": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "wd": "optim.weight_decay",
    "warmup": "optim.warmup_steps",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "gradient_clip_val": "optim.clip_norm",
    "model": "model.name",
    "dataset": "data.name",
    "data_dir": "data.dir",
    "dataset_dir": "data.dir",
    "num_workers": "data.workers",
    "bs": "train.batch_size",
    "batch": "train.batch_size",
    "micro_batch_size": "train.accumulate",
    "grad_accum": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "amp": "train.precision",
    "dtype": "train.precision",
    "mixed_precision": "train.precision",
    "timeout": "dist.train_timeout_s",
}


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
        path: getattr(getattr(config, section), name) for path in FIELDS for section, _, name in [path.partition(".")]
    }


def docs() -> dict[str, str]:
    """The docstring under each field, as one line. Python does not keep these, so the source is parsed."""
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


def nearest(path: str, *, besides: Collection[str] = ()) -> tuple[str, ...]:
    """The settings (or other names, `besides`) that a misspelt path is closest to; several only when they tie."""
    path = path.replace("-", "_").lower()
    section, _, name = path.rpartition(".")
    in_section = {known.partition(".")[2]: known for known in FIELDS if known.startswith(f"{section}.")}
    anywhere = {known.partition(".")[2]: known for known in FIELDS}
    guesses = (
        _closest(path, FIELDS, cutoff=0.85),
        tuple(known for known in FIELDS if known.endswith(f".{name}")),
        (OTHER_NAMES[name],) if name in OTHER_NAMES else (),
        () if section else _closest(name, besides, cutoff=0.7),
        tuple(in_section[near] for near in _closest(name, in_section, cutoff=0.6)),
        tuple(anywhere[near] for near in _closest(name, anywhere, cutoff=0.75)),
    )
    return next((guess for guess in guesses if guess), ())


def _closest(name: str, choices: Collection[str], *, cutoff: float) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name, choices, n=1, cutoff=cutoff))


def unknown_setting(path: str, *, besides: Collection[str] = ()) -> str:
    """The end of a message about a setting that does not exist."""
    if found := nearest(path, besides=besides):
        return f"unknown setting; did you mean {' or '.join(repr(name) for name in found)}?"
    section = path.partition(".")[0]
    if section in SECTIONS:
        names = [known.partition(".")[2] for known in FIELDS if known.startswith(f"{section}.")]
        return f"unknown setting; {section} has {', '.join(names)}"
    return f"unknown setting; settings are named SECTION.NAME, with a section of {', '.join(SECTIONS)}"
