"""The settings as a flat table by dotted path (`optim.lr`), the values each takes, and what a misspelt path means.

Flags, files, rules and help work on this table, so a setting is added in schema.py alone.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from drumline.config.schema import Bounds, Config


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


SWITCHES: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
UNIONS = (Union, UnionType)
_PLAIN_KINDS: Mapping[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
}


class Mismatch(Exception):  # noqa: N818 - it never leaves this room; what leaves is a ConfigError
    """A value that does not fit its setting."""


def from_text(annotation: Any, text: str) -> Any:
    """The value that a command-line string stands for."""
    return from_value(annotation, _read(annotation, text))


def from_value(annotation: Any, value: Any) -> Any:
    """A value from a TOML file or from Python code, as the annotated type."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        return _within(arguments[1], from_value(arguments[0], value))
    if is_optional(annotation):
        return None if _is_none(value) else from_value(_inner(annotation), value)
    if kind in UNIONS:
        return _scalar(value)
    if kind is Literal:
        return _choice(arguments, value)
    if kind is tuple:
        return _items(arguments, value)
    return _plain(kind, value)


def show(value: Any) -> str:
    """A value as it is shown in a message or in help."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    return repr(value)


def describe(annotation: Any) -> str:
    """What a setting takes, in words."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        return f"{describe(arguments[0])} {_limits(arguments[1])}"
    if is_optional(annotation):
        return f"{describe(_inner(annotation))}, or none"
    if kind is Literal:
        return " | ".join(arguments)
    if kind is tuple:
        count = "" if arguments[1] is Ellipsis else f"{len(arguments)} "
        return f"{count}{describe(arguments[0])}, with commas".replace("number", "numbers", 1)
    words = {int: "whole number", float: "number", bool: "true | false", str: "text"}
    return words.get(kind, "text, number or true | false")


def is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in UNIONS and NoneType in get_args(annotation)


def _inner(annotation: Any) -> Any:
    """The X of `X | None`."""
    return next(argument for argument in get_args(annotation) if argument is not NoneType)


def _is_none(value: Any) -> bool:
    # TOML has no null, so "none" is accepted there too: else a file could not undo a task's default.
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _read(annotation: Any, text: str) -> Any:
    """What a TOML file would hold in place of this text; what cannot be parsed stays text: `from_value` refuses it."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        return _read(arguments[0], text)
    if is_optional(annotation):
        return text if _is_none(text) else _read(_inner(annotation), text)
    if kind in UNIONS:
        return _read_scalar(text)
    if kind is tuple:
        return [_read(arguments[0], part.strip()) for part in text.split(",")]
    if kind is bool:
        return SWITCHES.get(text.lower(), text)
    return _read_number(kind, text) if kind in (int, float) else text


def _read_number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _read_scalar(text: str) -> Any:
    """An option of the user's own has no declared type: whole number, number, true or false, else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    whole = _read_number(int, text)
    return _read_number(float, text) if whole is text else whole


def _plain(kind: Any, value: Any) -> Any:
    """A number, true or false, or text."""
    if kind is collections.abc.Mapping:
        raise Mismatch(f"{show(value)} is not a table; set its options one by one, each by its own name")
    accepted, described = _PLAIN_KINDS[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        # Text that could be parsed comes from a file or from Python: on a command line it would have been parsed.
        is_quoted = isinstance(value, str) and not isinstance(_read(kind, value), str)
        raise Mismatch(f"{show(value)} is not {described}{'; write it without quotes' if is_quoted else ''}")
    if kind is float:
        return _finite(value)
    if value == "":
        raise Mismatch(f"{show(value)} is empty")
    return _unicode(value) if kind is str else value


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Mismatch(f"{show(value)} is not a finite number")
    return number


def _unicode(value: str) -> str:
    # Bytes on the command line that are not UTF-8 arrive as lone surrogates, which no TOML file can hold.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Mismatch(f"{show(value)} is not valid UTF-8 text") from None
    return value


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, float):
        return _finite(value)
    raise Mismatch(f"{show(value)} is not text, a number, true or false")


def _choice(choices: tuple[str, ...], value: Any) -> Any:
    if value in choices:
        return value
    nearest = difflib.get_close_matches(str(value).lower(), choices, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise Mismatch(f"{show(value)} is not one of {', '.join(choices)}{hint}")


def _items(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Mismatch(f"{show(value)} is not a list")
    count = None if arguments[1] is Ellipsis else len(arguments)
    if not value or count not in (None, len(value)):
        raise Mismatch(f"{show(value)} must have {count or 'at least 1'} item{'s' if count else ''}")
    try:
        return tuple(from_value(arguments[0], item) for item in value)
    except Mismatch as mismatch:
        raise Mismatch(f"{show(value)}, where {mismatch}") from None


def _within(bounds: Bounds, value: float) -> float:
    is_low = bounds.low is not None and value < bounds.low
    is_high = bounds.high is not None and value > bounds.high
    if is_low or is_high or (bounds.above is not None and value <= bounds.above):
        raise Mismatch(f"{show(value)} must be {_limits(bounds)}")
    return value


def _limits(bounds: Bounds) -> str:
    if bounds.low is not None and bounds.high is not None:
        return f"between {bounds.low:g} and {bounds.high:g}"
    limits = {"above": bounds.above, "at least": bounds.low, "at most": bounds.high}
    return " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
