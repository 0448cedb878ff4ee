"""What a user wants to be told: flags over pyproject.toml, rules by number, beginning or name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from drumline_lint.errors import ConfigError, UsageError
from drumline_lint.findings import Severity
from drumline_lint.settings import GivenSettings, Settings, make_settings, split_words
from made_up_rules import DOCS, report_of, told

OWN = {"DL000", "DL999"}
ALL = OWN | {"DL101", "DL102", "DL201"}
NO_FLAGS = GivenSettings()


def in_file(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.drumline.lint]\n{text}\n")


def settings(folder: Path, flags: GivenSettings = NO_FLAGS, *, use_file: bool = True) -> Settings:
    return make_settings(flags, DOCS, start=folder, use_file=use_file)


def by_flags(select: str = "", ignore: str = "", severity: Severity | None = None) -> GivenSettings:
    return GivenSettings(
        select=split_words([select]), ignore=split_words([ignore]), severity=severity
    )


def chosen(folder: Path, flags: GivenSettings = NO_FLAGS) -> set[str]:
    return set(settings(folder, flags).chosen)


def test_words_are_parted_by_commas_and_spaces() -> None:
    assert split_words(["DL1,DL2", " a b", ""]) == ["DL1", "DL2", "a", "b"]


@pytest.mark.parametrize(
    ("select", "ignore", "expected"),
    [
        ("", "", ALL),
        ("DL101", "", OWN | {"DL101"}),
        ("dl101", "", OWN | {"DL101"}),
        ("DL1", "", OWN | {"DL101", "DL102"}),
        ("odd-call", "", OWN | {"DL201"}),
        ("DL2,poor-call", "", OWN | {"DL201", "DL102"}),
        ("", "DL1", ALL - {"DL101", "DL102"}),
        ("", "bad-call,DL000", ALL - {"DL101", "DL000"}),
        ("DL101", "DL9", {"DL101", "DL000"}),
        ("DL1", "DL101", OWN | {"DL102"}),
        ("DL101", "DL1", OWN | {"DL101"}),
        ("DL101", "DL101", OWN),
        ("DL1", "DL1", OWN),
    ],
)
def test_rules_are_chosen(tmp_path: Path, select: str, ignore: str, expected: set[str]) -> None:
    assert chosen(tmp_path, by_flags(select, ignore)) == expected


def test_the_file_is_that_of_the_nearest_folder_with_settings(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    in_file(tmp_path, 'ignore = ["DL101"]')
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (inner / "train.py").touch()
    assert settings(inner / "train.py").root == tmp_path
    assert chosen(inner / "train.py") == ALL - {"DL101"}
    in_file(inner.parent, 'ignore = "DL102"')
    assert chosen(inner) == ALL - {"DL102"}
    assert settings(inner, use_file=False).chosen == ALL


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    in_file(
        tmp_path, 'select = ["DL1"]\nignore = ["bad-call"]\nseverity = "error"\nexclude = ["old"]'
    )
    assert chosen(tmp_path) == {"DL102", "DL000", "DL999"}
    assert chosen(tmp_path, by_flags(select="DL1")) == {"DL101", "DL102", "DL000", "DL999"}
    assert chosen(tmp_path, by_flags(ignore="poor-call")) == {"DL000", "DL999"}
    assert settings(tmp_path).severity == Severity.ERROR
    assert settings(tmp_path, by_flags(severity=Severity.NOTE)).severity == Severity.NOTE
    assert settings(tmp_path, GivenSettings(exclude=["new"])).exclude == ["old", "new"]
    assert settings(tmp_path).exclude == ["old"]


def test_severity_hides_what_is_not_bad_enough(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"x.py": "bad()\npoor()\nodd()\n"}

    def shown(flags: GivenSettings) -> Iterable[str]:
        report = report_of(files, settings=settings(tmp_path, flags))
        return [finding.rule for finding in report.findings]

    assert shown(NO_FLAGS) == ["DL101", "DL102"]
    assert shown(by_flags(severity=Severity.NOTE)) == ["DL101", "DL102", "DL201"]
    assert shown(by_flags(severity=Severity.ERROR)) == ["DL101"]
    # What was asked for by its own name is shown; a beginning of numbers asks for none in
    # particular.
    assert shown(by_flags(select="odd-call")) == ["DL201"]
    assert shown(by_flags(select="DL201,DL1", severity=Severity.ERROR)) == ["DL101", "DL201"]
    assert shown(by_flags(select="DL2")) == []


def test_rules_are_ignored_in_some_files(tmp_path: Path) -> None:
    in_file(
        tmp_path, "[tool.drumline.lint.per-file-ignores]\n'tests/*' = ['DL1']\n'b.py' = 'odd-call'"
    )
    wishes = replace(settings(tmp_path), severity=Severity.NOTE)
    code = "bad()\nodd()\n"
    files: dict[str, str | bytes] = {
        str(tmp_path / name): code
        for name in ("a.py", "b.py", "tests/deep/c.py", "other/tests/d.py")
    }
    found = [
        line.removeprefix(f"{tmp_path}/")
        for line in told(report_of(files, settings=wishes).findings)
    ]
    assert found == [
        *("a.py:1:1 DL101", "a.py:2:1 DL201", "b.py:1:1 DL101"),
        *("other/tests/d.py:1:1 DL101", "other/tests/d.py:2:1 DL201", "tests/deep/c.py:2:1 DL201"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selct = []", "there is no setting 'selct'; did you mean 'select'?"),
        ("select = 3", "select is a list of rules, not 3"),
        ("ignore = [1]", "ignore is a list of rules, not [1]"),
        ("exclude = 'a'", "exclude is a list of globs, not 'a'"),
        ("severity = 'bad'", "severity is note, warning or error, not 'bad'"),
        ("severity = ['note']", "severity is note, warning or error, not ['note']"),
        (
            "per-file-ignores = ['x']",
            "per-file-ignores is a table of globs with lists of rules, not ['x']",
        ),
        (
            "per-file-ignores = {x = 1}",
            "per-file-ignores is a table of globs with lists of rules, not {'x': 1}",
        ),
    ],
)
def test_wrong_settings_are_reported(tmp_path: Path, text: str, message: str) -> None:
    in_file(tmp_path, text)
    with pytest.raises(
        ConfigError, match=re.escape(f"pyproject.toml, [tool.drumline.lint]: {message}")
    ):
        settings(tmp_path)
    assert settings(tmp_path, use_file=False).chosen == ALL


def test_all_wrong_settings_are_reported_at_once(tmp_path: Path) -> None:
    in_file(tmp_path, "a = 1\nseverity = 2")
    with pytest.raises(ConfigError, match="2 problems in the configuration") as error:
        settings(tmp_path)
    assert "try: docs/lint.md has all settings; --no-config ignores them" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('select = ["DL777"]', "[tool.drumline.lint] select: there is no rule 'DL777'"),
        (
            'ignore = ["bad-cal"]',
            "[tool.drumline.lint] ignore: there is no rule 'bad-cal'; did you mean 'bad-call'?",
        ),
        (
            'per-file-ignores = {"x" = ["y"]}',
            "[tool.drumline.lint] per-file-ignores: there is no rule 'y'",
        ),
    ],
)
def test_unknown_rules_in_the_file_are_reported(tmp_path: Path, text: str, message: str) -> None:
    in_file(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        settings(tmp_path, by_flags(select="DL101"))
    assert "try: --list shows all rules" in str(error.value)


def test_unknown_rules_in_flags_are_reported(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--select: there is no rule 'ODD-cal'; did you mean 'odd-call'"
    ):
        settings(tmp_path, by_flags(select="ODD-cal"))
    with pytest.raises(UsageError, match=r"^--ignore: there is no rule 'zzz'\n"):
        settings(tmp_path, by_flags(ignore="zzz"))


def test_a_rule_that_was_removed_may_still_be_named(tmp_path: Path) -> None:
    in_file(tmp_path, 'ignore = ["DL044"]')
    assert settings(tmp_path).chosen == settings(tmp_path, use_file=False).chosen


@pytest.mark.parametrize("data", [b"[tool", b"\xff"])
def test_a_file_that_is_no_toml_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(data)
    with pytest.raises(UsageError, match=r"pyproject\.toml cannot be read: .*\n.*--no-config"):
        settings(tmp_path)
