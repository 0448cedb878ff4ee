"""Rewrites docs/settings.md from what drumline/config/schema.py declares.

python -m tests.settings_page docs/settings.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from drumline.config.fields import FIELDS, SECTIONS, Field, describe_type
from drumline.config.help import field_docs, show_default
from drumline.config.schema import SettingScope

INTRODUCTION = """\
# Settings

Every setting, as `drumline train --help` prints it. [Configuration](configuration.md) says how to give one. This page
is made from `drumline/config/schema.py` by `python -m tests.settings_page docs/settings.md`.

Unless a mark says otherwise, a setting is part of the experiment: all ranks need the same value, a resumed run reports
and records a change, and a finished run refuses one.

| mark | means |
| --- | --- |
| machine | it names a place or a capacity of the machine: hosts may differ, and another value is nothing to report |
| machine, alike | the same, but all ranks of a job need the same value |
| same result | another value does not change the bits of later steps: resumed and finished runs accept it |
| end | a finished run accepts another value, a resumed one records it |
| built-in | read by built-in models and datasets, and by tasks that choose to |
"""
TABLE_HEAD = "| setting | takes | default | what it does |\n| --- | --- | --- | --- |\n"


def settings_page() -> str:
    docs = field_docs()
    parts = [INTRODUCTION]
    for section, cls in SECTIONS.items():
        rows = [
            setting_row(path, field, docs[path])
            for path, field in FIELDS.items()
            if path.startswith(f"{section}.")
        ]
        parts.append(f"## {section}\n\n{cls.__doc__}\n\n{TABLE_HEAD}{''.join(rows)}")
    return "\n".join(parts)


def setting_row(path: str, field: Field, doc: str) -> str:
    name = f"`{path}.NAME`" if field.is_table else f"`{path}`"
    marks = ", ".join(_marks(field.scope))
    text = f"{doc} *({marks})*" if marks else doc
    cells = (
        name,
        describe_type(field.annotation),
        f"`{show_default(field, field.default)}`",
        text,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _marks(scope: SettingScope) -> list[str]:
    if scope.per_machine:
        return ["machine" if scope.may_differ_across_ranks else "machine, alike"]
    marks = {
        "same result": not scope.changes_result,
        "end": scope.changes_result and not scope.changes_finished_run,
        "built-in": scope.of_built_ins,
    }
    return [mark for mark, holds in marks.items() if holds]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_page(), encoding="utf-8")
