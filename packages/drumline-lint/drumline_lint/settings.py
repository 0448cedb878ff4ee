"""What to report: `[tool.drumline.lint]` of the nearest pyproject.toml, and the flags, which
override it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline_lint.errors import ConfigError, UsageError, did_you_mean
from drumline_lint.findings import OWN_RULES, Finding, Rule, Severity
from drumline_lint.reading.discovery import is_matched
from drumline_lint.untrusted import SETTINGS_BYTES, parse_toml, read_regular

Rules = Mapping[str, Rule]
"""By number."""
TABLE = "tool.drumline.lint"
NEXT_STEP = "docs/lint.md has all settings; --no-config ignores them"
# Rules of earlier versions.
REMOVED = frozenset(
    f"DL{number}"
    for number in (
        "001 002 011 013 022 027 029 033 037 038 039 041 044 051 075 078 081 085 111 113 115 122 124 "
        "125 126 127 129 130 134 138 141 142 144 145 146 147"
    ).split()
)

# Which rules are meant


@dataclass(frozen=True)
class Selection:
    """Rules by number; those that were selected by their full number or name are `exact`."""

    exact: frozenset[str]
    all: frozenset[str]


def find_rule(word: str, rules: Rules, *, where: str) -> Rule:
    """The one rule of this number or name: `DL012`, `accumulation-without-no-sync`.

    Raises UsageError, which begins with `where`.
    """
    for rule in rules.values():
        if word.upper() == rule.id or word.lower() == rule.name:
            return rule

    names = {*rules, *(rule.name for rule in rules.values())}
    meant = did_you_mean(word.lower() if "-" in word else word.upper(), names)
    hint = f"; {meant}" if meant.startswith("did you mean") else ""
    raise UsageError(
        f"{where}: there is no rule {word!r}{hint}", next_step="--list shows all rules"
    )


def select(words: Iterable[str], rules: Rules, *, where: str) -> Selection:
    """The rules that the words select: `DL012`, `DL1` or `unguarded-save`.

    `where` begins the message about an unknown word. Rules that were removed may still be named:
    settings of other projects name them.
    """
    exact: set[str] = set()
    begun: set[str] = set()

    for word in words:
        number = word.upper()
        numbers = {rule for rule in rules if rule.startswith(number)}
        if number in rules or (not numbers and number not in REMOVED):
            exact.add(find_rule(word, rules, where=where).id)
        begun |= numbers

    return Selection(frozenset(exact), frozenset(exact | begun))


def split_words(texts: Iterable[str]) -> list[str]:
    """`DL001,DL002` and `DL001 DL002` are two words each."""
    return [word for text in texts for word in text.replace(",", " ").split()]


# Settings


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """Options as given on the command line, or in the file."""

    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    exclude: Sequence[str] = ()
    severity: Severity | None = None
    per_file_ignores: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resulting settings."""

    chosen: frozenset[str]
    """The rules to run, by number."""
    named: frozenset[str] = frozenset()
    """Rules that were selected by their full number or name: they are shown at any severity."""
    severity: Severity = Severity.WARNING
    exclude: Sequence[str] = ()
    per_file_ignores: Mapping[str, frozenset[str]] = field(default_factory=dict)
    root: Path = field(default_factory=Path.cwd)
    """What globs are relative to."""

    def is_wanted(self, finding: Finding) -> bool:
        """Whether its rule was chosen, and is not ignored in its file."""
        path = Path(finding.place.path)
        for glob, rules in self.per_file_ignores.items():
            if finding.rule in rules and is_matched(path, [glob], self.root):
                return False
        return finding.rule in self.chosen

    def is_shown(self, finding: Finding) -> bool:
        """Whether it is severe enough, or its rule was selected by its name."""
        return finding.rule in self.named or finding.severity.weight >= self.severity.weight


def make_settings(
    flags: GivenSettings, rules: Rules, *, start: Path | None, use_file: bool = True
) -> Settings:
    """The settings of the flags and of the nearest file.

    `start`: the path from which the file is searched upwards.
    """
    settings_file = find_table(start or Path.cwd()) if use_file else None
    path, table = settings_file or (None, {})
    where = f"{path}, [{TABLE}]"
    file = _checked(table, where)

    file_ignore = select(file.ignore, rules, where=f"{where} ignore")
    file_select = select(file.select, rules, where=f"{where} select")
    ignore = select(flags.ignore, rules, where="--ignore")
    selection = select(flags.select, rules, where="--select")

    if flags.select:  # a rule that is selected here is run even if the file ignores it
        chosen = _selected_rules(selection, ignore, rules)
    else:
        selection = file_select
        chosen = _selected_rules(file_select, file_ignore, rules) - ignore.all

    return Settings(
        chosen=chosen,
        named=selection.exact,
        severity=flags.severity or file.severity or Severity.WARNING,
        exclude=[*file.exclude, *flags.exclude],
        per_file_ignores={
            glob: select(words, rules, where=f"{where} per-file-ignores").all
            for glob, words in file.per_file_ignores.items()
        },
        root=path.parent if path else Path.cwd(),
    )


def _selected_rules(selection: Selection, ignore: Selection, rules: Rules) -> frozenset[str]:
    """The rules to run, by number.

    A rule's full name takes precedence over the beginning of a number; otherwise `ignore` over
    `select`. Unreadable files are always reported.
    """
    selected = selection.all | OWN_RULES.keys() if selection.all else frozenset(rules)
    return (selected - ignore.all) | (selection.exact - ignore.exact)


# The file


def find_table(start: Path) -> tuple[Path, dict[str, Any]] | None:
    """The nearest pyproject.toml from here upwards that has settings for the linter, and these."""
    here = Path(os.path.realpath(start))
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if not os.path.isfile(path):  # noqa: PTH113 - a folder that may not be entered has none
            continue

        table: Any = _toml(path)
        for name in TABLE.split("."):
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict):
            return path, table

    return None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_regular(path, most=SETTINGS_BYTES).decode())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", next_step="fix it, or ignore it with --no-config"
        ) from None


def _checked(table: Mapping[str, Any], where: str) -> GivenSettings:
    """The settings of a file; all mistakes in the table are reported at once.

    For example:

        [tool.drumline.lint]
        ignore = ["DL025"]
        severity = "note"

        [tool.drumline.lint.per-file-ignores]
        "examples/*" = ["DL1"]
    """
    problems = []
    for key, value in table.items():
        is_right, what = FORMS.get(key, (None, ""))
        if is_right is None:
            problems.append(f"{where}: there is no setting {key!r}; {did_you_mean(key, FORMS)}")
        elif not is_right(value):
            problems.append(f"{where}: {key} is {what}, not {value!r}")

    if problems:
        raise ConfigError(problems, next_step=NEXT_STEP)

    return GivenSettings(
        select=_words(table.get("select", [])),
        ignore=_words(table.get("ignore", [])),
        exclude=list(table.get("exclude", [])),
        severity=Severity(table["severity"]) if "severity" in table else None,
        per_file_ignores={
            glob: _words(words) for glob, words in table.get("per-file-ignores", {}).items()
        },
    )


def _words(value: str | Sequence[str]) -> list[str]:
    """`"DL001, DL002"` and `["DL001", "DL002"]` are the same."""
    return split_words([value] if isinstance(value, str) else value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_words(value: Any) -> bool:
    return isinstance(value, str) or _is_texts(value)


def _is_severity(value: Any) -> bool:
    return value in list(Severity)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_are_words, value.values()))


FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "select": (_are_words, "a list of rules"),
    "ignore": (_are_words, "a list of rules"),
    "exclude": (_is_texts, "a list of globs"),
    "severity": (_is_severity, "note, warning or error"),
    "per-file-ignores": (_is_table, "a table of globs with lists of rules"),
}
"""For each setting: whether a value is right, and what it is."""
