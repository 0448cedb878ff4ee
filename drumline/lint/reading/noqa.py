"""Which lines ask to be left alone: `# noqa` by all rules, `# noqa: DL012, DL013` by these."""

from __future__ import annotations

import re
from collections.abc import Mapping

Silenced = Mapping[int, frozenset[str]]
"""The rules by line; none named means all."""

_NOQA = re.compile(r"#\s*noqa(?::\s*(?P<rules>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)


def silenced_lines(text: str) -> Silenced:
    """Of Python or of a shell script."""
    if "noqa" not in text.lower():
        return {}
    silenced = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if found := _NOQA.search(line):
            named = re.split(r"[\s,]+", found["rules"] or "")
            silenced[number] = frozenset(name.upper() for name in named if name)
    return silenced


def is_silenced(silenced: Silenced, rule: str, first_line: int, last_line: int) -> bool:
    """Whether one of the lines on which it was found asks this rule to leave it alone."""
    return any(
        line in silenced and (not silenced[line] or rule in silenced[line])
        for line in range(first_line, last_line + 1)
    )
