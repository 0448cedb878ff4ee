"""docs/lint.md lists every rule, and rules.md has its text."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

from drumline_lint.findings import OWN_RULES
from drumline_lint.linter import all_docs
from drumline_lint.rules import all_rules
from drumline_lint.settings import FORMS, GivenSettings, make_settings
from lint_page import rewritten, with_rules
from made_up_rules import BAD

PAGE = Path(__file__).parents[3] / "docs" / "lint.md"
TEXTS = Path(__file__).parents[1] / "drumline_lint" / "rules" / "rules.md"


def test_the_page_is_in_step_with_the_rules() -> None:
    assert PAGE.read_text() == rewritten(PAGE), (
        "python packages/drumline-lint/tests/lint_page.py docs/lint.md"
    )


def test_every_section_is_a_rule_and_every_rule_has_one() -> None:
    numbers = re.findall(r"^### (DL[0-9]+) ", TEXTS.read_text(), re.MULTILINE)
    assert numbers == [*all_rules(), *OWN_RULES]


def test_the_page_names_every_rule_that_is_not_for_tests() -> None:
    sentence = re.search(
        r"findings are notes;\s(.*?)\sare not reported", PAGE.read_text(), re.DOTALL
    )
    assert sentence is not None
    named = []
    for first, last in re.findall(r"(DL[0-9]+)(?: to (DL[0-9]+))?", sentence[1]):
        named += [number for number in all_rules() if first <= number <= (last or first)]
    assert named == [number for number, module in all_rules().items() if not module.RULE.in_tests]


def test_the_settings_on_the_page_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert set(tomllib.loads(text)["tool"]["drumline"]["lint"]) == set(FORMS)
    (tmp_path / "pyproject.toml").write_text(text)
    settings = make_settings(GivenSettings(), all_docs(all_rules()), start=tmp_path)
    assert (settings.root, settings.severity) == (tmp_path, "note")


def test_a_rule_has_a_row_that_leads_to_its_text() -> None:
    rule = replace(BAD.RULE, summary="a | b", language="shell")
    text = with_rules("# Lint\n\n## Rules\n\nold", [rule])
    assert text.startswith("# Lint\n\n## Rules\n\n`drumline lint --list`")
    link = "../packages/drumline-lint/drumline_lint/rules/rules.md"
    assert f"| [DL101]({link}#dl101-bad-call) | bad-call | error | a \\| b | yes |\n" in text
    assert f"| [DL000]({link}#dl000-unreadable) | unreadable | error | a file that" in text


def test_the_page_is_in_plain_characters() -> None:
    assert PAGE.read_text().isascii()
