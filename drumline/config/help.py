"""The text of `--help`: a verb's own flags, and for `drumline train` every setting with its type,
default and doc."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from drumline.config import schema
from drumline.config.fields import (
    FIELDS,
    SECTIONS,
    TASK_SECTION,
    Field,
    describe_type,
    flag_text,
    switch_word,
)
from drumline.config.flags import FlagTable
from drumline.config.presets import PRESETS

MIN_WIDTH = 64
MAX_WIDTH = 100
DOC_INDENT = 6
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
NO_TASK_SETTINGS: Mapping[str, tuple[Field, str]] = MappingProxyType({})
OWN_TASK = "FILE.py:CLASS"
GRAMMAR = (
    "A setting is given as --section.name value, or in a TOML file (--config FILE) as `name = value` under "
    "[section]. A true | false setting is turned on by its name alone, and off by --no-section.name. "
    "A flag overrides the file, the file overrides DATASET_DIR, and that overrides the task's defaults. "
    "[Brackets] hold the default."
)


def render_help(
    *,
    width: int = 80,
    task: str | None = None,
    task_defaults: Mapping[str, Any] = NO_DEFAULTS,
    task_settings: Mapping[str, tuple[Field, str]] = NO_TASK_SETTINGS,
) -> str:
    """The tasks and all settings, as plain text; `task_defaults` are shown in place of the
    schema's, as `task`'s. `task_settings`: the task's own settings, each with its doc."""
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    docs = field_docs()
    blocks = [
        ["tasks", *_tasks(width)],
        ["settings", *_wrapped(GRAMMAR, width, indent=2)],
    ]
    if task_settings:
        block = [f"{TASK_SECTION}  Settings of {task}."]
        for path, (field, doc) in task_settings.items():
            default = show_default(field, field.default)
            block.append(_setting_entry(path, field, doc, default, width))
        blocks.append(block)

    for section, cls in SECTIONS.items():
        block = [f"{section}  {cls.__doc__}"]
        for path, field in FIELDS.items():
            if path.startswith(f"{section}."):
                default = _default(path, task, task_defaults)
                block.append(_setting_entry(path, field, docs[path], default, width))
        blocks.append(block)
    return "\n\n".join(map("\n".join, blocks)) + "\n"


def _setting_entry(path: str, field: Field, doc: str, default: str, width: int) -> str:
    flag = f"--{path}.NAME" if field.is_table else f"--{path}"
    takes = describe_type(field.annotation)
    return render_entry(flag, takes, doc, default=default, width=width)


def field_docs() -> dict[str, str]:
    """The docstring under each setting, as one line. Python does not keep these, so the source is
    parsed."""
    docs: dict[str, str] = {}
    section_of = {cls.__name__: section for section, cls in SECTIONS.items()}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef) and node.name in section_of:
            docs |= _docs_in(node, section_of[node.name])
    return docs


def task_docs(task: type[Any]) -> dict[str, str]:
    """The same for the settings that a task's class declares, or a class that it inherits from."""
    docs: dict[str, str] = {}
    for cls in reversed(task.__mro__):
        with contextlib.suppress(OSError, TypeError):  # there is no source
            module = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            docs |= _docs_in(module.body[0], TASK_SECTION)
    return docs


def _docs_in(node: ast.stmt, section: str) -> dict[str, str]:
    docs = {}
    for setting, doc in itertools.pairwise(getattr(node, "body", ())):
        match setting, doc:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                docs[f"{section}.{name}"] = " ".join(text.split())
    return docs


def render_entry(
    flag: str, takes: str, doc: str, *, default: str | None = None, width: int = 80
) -> str:
    """One flag: a line with what it takes, and its doc below."""
    margin = "\n" + " " * DOC_INDENT
    head = f"  {flag}  {takes}".rstrip()
    if default is not None:
        head += f"  [{default}]"
    # what does not fit beside the flag goes below it, in one piece
    if len(head) > width:
        head = head.replace("  [", f"{margin}[")
    if len(head.partition("\n")[0]) > width:
        head = head.replace(f"  {takes}", margin + takes, 1)
    return "\n".join([head, *_wrapped(doc, width, indent=DOC_INDENT)])


def render_flags(groups: Mapping[str, FlagTable]) -> str:
    """A verb's own flags, below the title of each group, as wide as the terminal."""
    width = max(MIN_WIDTH, min(shutil.get_terminal_size().columns, MAX_WIDTH))
    blocks = []
    for title, flags in groups.items():
        entries = [
            render_entry(f"--{name}", takes, doc, width=width)
            for name, (_, takes, doc) in flags.items()
        ]
        blocks.append("\n".join([*textwrap.wrap(title, width), *entries]))
    return "\n\n".join(blocks) + "\n"


def _tasks(width: int) -> Iterator[str]:
    summaries = {name: preset.summary for name, preset in PRESETS.items()}
    summaries[OWN_TASK] = (
        "a Task of your own; package.module:CLASS works too. Its help has its own settings, --task.NAME"
    )
    column = max(len(name) for name in summaries) + 4
    for name, summary in summaries.items():
        yield from textwrap.wrap(
            summary,
            width,
            initial_indent=f"  {name}".ljust(column),
            subsequent_indent=" " * column,
        )


def _default(path: str, task: str | None, task_defaults: Mapping[str, Any]) -> str:
    prefix = f"{path}."
    options = {
        setting.removeprefix(prefix): value
        for setting, value in task_defaults.items()
        if setting.startswith(prefix)
    }
    if path in task_defaults or options:
        value = options or task_defaults[path]
        return f"{task or 'task'}: {show_default(FIELDS[path], value)}"
    return show_default(FIELDS[path], FIELDS[path].default)


def show_default(field: Field, value: Any) -> str:
    """A default as it would be typed."""
    if not isinstance(value, Mapping):
        return switch_word(field.annotation, value) or flag_text(value)
    items = [f"{name}={flag_text(item)}" for name, item in value.items()]
    return ", ".join(items) or "empty"


def _wrapped(text: str, width: int, *, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=False,
    )
