"""A report for people."""

from __future__ import annotations

import sys

from drumline_lint.findings import RULE_FAILED, UNREADABLE, problem
from drumline_lint.output.text import (
    WIDEST_LINE,
    as_explanation,
    as_list,
    as_statistics,
    as_text,
    summary_line,
)
from made_up_rules import BAD, DOCS, ODD, USUAL, report_of

FIX = "    fix: call good() instead"

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def lines(files: dict[str, str | bytes]) -> list[str]:
    return as_text(report_of(files)).splitlines()


def test_place_rule_message_code_and_fix() -> None:
    assert lines({"train.py": "x = 1\nif x:\n\tbad(1)\n"}) == [
        "train.py:3:2: error DL101 bad-call: bad() is called",
        "    | bad(1)",
        "    | ^~~~~~",
        FIX,
        "1 error in 1 of 1 file; 1 can be fixed (--fix)",
    ]


def test_the_caret_is_below_what_is_meant() -> None:
    assert lines({"a.py": "x = '漢é'; poor(\n  1)\n"})[1:3] == [
        "    | x = '漢é'; poor(",
        "    |            ^~~~~",
    ]


def test_long_lines_are_cut_around_the_place() -> None:
    shown, caret = lines({"a.py": f"x = '{'y' * 300}'; poor(); z = '{'w' * 300}'\n"})[1:3]
    assert len(shown) <= WIDEST_LINE + 6
    assert shown[caret.index("^") :].startswith("poor()")
    assert caret.strip().endswith("| " + " " * 60 + "^~~~~~")


def test_no_code_can_move_the_cursor() -> None:
    text = as_text(report_of({"a\x1b[2J.py": "poor('\x1b[2J\x07')\n"}))
    assert "\x1b" not in text
    assert r"| poor('\x1b[2J\x07')" in text


def test_colours_are_for_terminals() -> None:
    report = report_of({"a.py": "bad()\n"})
    assert "\x1b" not in as_text(report)
    coloured = as_text(report, colour=True)
    assert "\x1b[31merror\x1b[0m DL101" in coloured
    assert "\x1b[31m^~~~~\x1b[0m" in coloured


def test_code_that_cannot_be_parsed_is_shown() -> None:
    assert lines({"a.py": "x = (\n"}) == [
        f"a.py:1:5: error DL000 unreadable: the code cannot be parsed: '(' was never closed (read as Python {PYTHON})",
        "    | x = (",
        "    |     ^",
        "    fix: fix it, or run the linter with the Python that it is for, or leave it out with --exclude",
        "1 file could not be read",
    ]


def test_the_closing_line_counts() -> None:
    files: dict[str, str | bytes] = {
        "a.py": "bad()\nbad()\npoor()\nodd()\n",
        "b.py": "poor(bad())\n",
        "c.py": "odd(),odd()\n",
    }
    assert summary_line(report_of(files, settings=USUAL)) == (
        "3 errors, 2 warnings in 2 of 3 files; 3 can be fixed (--fix); 3 notes not shown (--severity note)"
    )
    assert summary_line(report_of({"a.py": "", "b.py": ""})) == "nothing found in 2 files"
    assert summary_line(report_of({})) == "there is no file to read"
    report = report_of({"a.py": "poor()", "b.py": "("})
    report.problems.append(problem(RULE_FAILED, "a.py", "x"))
    report.fixed = 2
    assert summary_line(report) == (
        "1 warning in 1 of 1 file; 1 file could not be read, a rule failed 1 time; 2 fixed"
    )


def test_statistics_have_the_most_frequent_first() -> None:
    report = report_of({"a.py": "poor()\nodd()\nodd()\n" + "bad()\n" * 10, "b.py": "("})
    assert as_statistics(report, DOCS).splitlines() == [
        "10  error    DL101  bad-call    a call of bad-call",
        " 2  note     DL201  odd-call    a call of odd-call",
        " 1  error    DL000  unreadable  a file that could not be read, so no rule was run on it",
        " 1  warning  DL102  poor-call   a call of poor-call",
        "10 errors, 1 warning, 2 notes in 1 of 1 file; 1 file could not be read; 10 can be fixed (--fix)",
    ]


def test_the_list_has_a_line_for_each_rule() -> None:
    assert as_list([BAD.RULE, ODD.RULE]).splitlines() == [
        "DL101  error    bad-call  a call of bad-call (--fix)",
        "DL201  note     odd-call  a call of odd-call",
    ]


def test_what_noqa_cannot_silence_is_not_suggested() -> None:
    explained = as_explanation(UNREADABLE)
    assert "noqa" not in explained
    assert (
        'To silence it: `ignore = ["DL000"]` under [tool.drumline.lint] in\npyproject.toml, or --ignore DL000.\n'
        in explained
    )


def test_a_rule_is_explained() -> None:
    assert (
        as_explanation(BAD.RULE)
        == """\
DL101 bad-call (error; --fix can do it)
a call of bad-call

bad-call bites.

Always.

Fix: call good() instead

Bad:

    bad_call()

Good:

    good()

To silence it: `# noqa: DL101` on the line, `ignore = ["DL101"]` under [tool.drumline.lint] in
pyproject.toml, or --ignore DL101.

More: https://github.com/OWNER/drumline/blob/main/packages/drumline-lint/drumline_lint/rules/rules.md#dl101-bad-call
"""
    )
