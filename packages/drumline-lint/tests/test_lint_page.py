"""docs/lint.md is what the rules say."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

from drumline_lint.linter import all_docs
from drumline_lint.output.page import page
from drumline_lint.rules import all_rules
from drumline_lint.settings import KEYS, Wishes, make_settings
from made_up_rules import BAD

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_in_step_with_the_rules() -> None:
    made = page([module.RULE for module in all_rules().values()])
    assert (DOCS / "lint.md").read_text() == made, "python -m drumline_lint.output.page > docs/lint.md"


def test_the_settings_on_the_page_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", (DOCS / "lint.md").read_text(), re.MULTILINE | re.DOTALL)
    assert set(tomllib.loads(text)["tool"]["drumline"]["lint"]) == set(KEYS)
    (tmp_path / "pyproject.toml").write_text(text)
    settings = make_settings(Wishes(), all_docs(all_rules()), start=tmp_path)
    assert (settings.root, settings.severity) == (tmp_path, "note")


def test_a_rule_has_a_row_and_a_section() -> None:
    rule = replace(BAD.RULE, summary="a | b", language="shell")
    text = page([rule])
    assert "| [DL101](#dl101-bad-call) | bad-call | error | a \\| b | yes |\n" in text
    assert (
        "### DL101 bad-call\n\nError: a | b.\n\nbad-call bites.\n\nAlways.\n\n"
        "Fix: call good() instead. `--fix` can do it.\n\n"
        "Bad:\n\n```sh\nbad_call()\n```\n\nGood:\n\n```sh\ngood()\n```\n"
    ) in text


def test_what_is_no_rule_has_a_section_too() -> None:
    text = page([])
    assert "| [DL000](#dl000-unreadable) | unreadable | error | a file that could not be read" in text
    assert "### DL000 unreadable\n\nError: a file that could not be read" in text
    assert "### DL999 rule-failed\n\nError: a rule that failed" in text
    assert "```py\n" not in text


def test_the_page_is_in_plain_characters() -> None:
    assert (DOCS / "lint.md").read_text().isascii()
