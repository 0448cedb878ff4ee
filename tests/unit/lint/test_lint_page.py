"""docs/lint.md is what the rules say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drumline.lint.rules import all_rules
from drumline.lint.telling.page import page
from tests.unit.lint.made_up_rules import BAD

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_in_step_with_the_rules() -> None:
    made = page([module.RULE for module in all_rules().values()])
    assert (DOCS / "lint.md").read_text() == made, "python -m drumline.lint.telling.page > docs/lint.md"


def test_a_rule_has_a_row_and_a_section() -> None:
    rule = replace(BAD.RULE, summary="a | b", language="shell")
    text = page([rule])
    assert "| [DL101](#dl101-bad-call) | bad-call | error | a \\| b 🔧 |\n" in text
    assert (
        "### DL101 bad-call\n\nError: a | b.\n\nbad-call bites.\n\nAlways.\n\n"
        "Fix: call good() instead. `--fix` can do it.\n\nBad:\n\n```sh\nbad_call()\n```\n\nGood:\n\n```sh\ngood()\n```\n"
    ) in text
