"""Rewrites the table of rules on docs/lint.md, everything below `## Rules`.

python packages/drumline-lint/tests/lint_page.py docs/lint.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from drumline_lint.findings import OWN_RULES, Rule
from drumline_lint.rules import all_rules

HEADING = """\
## Rules

`drumline lint --list` prints this table, `drumline lint --explain DL014` one of the rules. DL0xx are about Python,
DL1xx about launch files. The last two are not rules: they report what could not be checked. The table is made by
`python packages/drumline-lint/tests/lint_page.py docs/lint.md`.

| rule | name | level | found | fixed by `--fix` |
| --- | --- | --- | --- | --- |
"""


RULES_FILE = "packages/drumline-lint/drumline_lint/rules/rules.md"


def with_rules(page: str, rules: Sequence[Rule]) -> str:
    before, _, _ = page.partition("## Rules")
    return before + HEADING + "".join(map(_row, [*rules, *OWN_RULES.values()]))


def _row(rule: Rule) -> str:
    link = f"[{rule.id}](../{RULES_FILE}#{rule.id.lower()}-{rule.name})"
    cells = [link, rule.name, rule.severity, rule.summary, "yes" if rule.fixable else "no"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def rewritten(path: Path) -> str:
    rules = [module.RULE for module in all_rules().values()]
    return with_rules(path.read_text(encoding="utf-8"), rules)


if __name__ == "__main__":
    page_path = Path(sys.argv[1])
    page_path.write_text(rewritten(page_path), encoding="utf-8")
