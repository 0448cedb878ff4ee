"""Rewrites the rules on docs/lint.md, everything below `## Rules`.

python packages/drumline-lint/tests/lint_page.py docs/lint.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from drumline_lint import findings
from drumline_lint.findings import OWN_RULES, Rule
from drumline_lint.rules import all_rules

HEADING = """\
## Rules

`drumline lint --list` prints this table, `drumline lint --explain DL014` one of the rules. DL0xx are about Python,
DL1xx about scripts. The last two are not rules: they report what could not be checked. This part is made from
`packages/drumline-lint/drumline_lint/rules/rules.md` by
`python packages/drumline-lint/tests/lint_page.py docs/lint.md`.

| rule | name | level | found | fixed by `--fix` |
| --- | --- | --- | --- | --- |
"""


def with_rules(page: str, rules: Sequence[Rule], texts: str) -> str:
    table = "".join(map(_row, [*rules, *OWN_RULES.values()]))
    return f"{page.partition(HEADING[:9])[0]}{HEADING}{table}\n{texts[texts.index('### ') :]}"


def _row(rule: Rule) -> str:
    cells = [f"[{rule.id}](#{rule.id.lower()}-{rule.name})", rule.name, rule.severity, rule.summary]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | {'yes' if rule.fixable else 'no'} |\n"


def rewritten(path: Path) -> str:
    texts = (Path(findings.__file__).parent / "rules" / "rules.md").read_text(encoding="utf-8")
    return with_rules(
        path.read_text(encoding="utf-8"), [one.RULE for one in all_rules().values()], texts
    )


if __name__ == "__main__":
    page_path = Path(sys.argv[1])
    page_path.write_text(rewritten(page_path), encoding="utf-8")
