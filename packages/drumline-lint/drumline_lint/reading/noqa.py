"""Which lines ask to be left alone: `# noqa` by all rules, `# noqa: DL012, unguarded-save` by these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Silenced = Mapping[int, frozenset[str]]
"""Numbers and names of rules by line, in capitals; none named means all."""
Lines = tuple[int, int]
"""The first and the last of some that belong together."""

_RULE = r"(?:[A-Z]+[0-9]+|[A-Z]+(?:-[A-Z]+)+)"
_NOQA = re.compile(rf"#\s*noqa(?::\s*(?P<rules>{_RULE}(?:[\s,]+{_RULE})*))?", re.IGNORECASE)


def silenced_lines(text: str, together: Callable[[], Iterable[Lines]]) -> Silenced:
    """Of Python or of a shell script. What is said on one of the lines `together` is said of all of them."""
    if "noqa" not in text.lower():
        return {}
    silenced: dict[int, frozenset[str]] = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if found := _NOQA.search(line):
            named = re.split(r"[\s,]+", found["rules"] or "")
            silenced[number] = frozenset(name.upper() for name in named if name)
    return silenced | _spread(silenced, together()) if silenced else {}


def _spread(silenced: Silenced, together: Iterable[Lines]) -> dict[int, frozenset[str]]:
    spread: dict[int, frozenset[str]] = {}
    for first, last in together:
        lines = range(first, last + 1)
        said = [silenced[line] for line in lines if line in silenced]
        if said:
            named = frozenset().union(*said) if all(said) else frozenset[str]()
            spread |= dict.fromkeys(lines, named)
    return spread


def is_silenced(silenced: Silenced, rule: str, name: str, lines: Lines) -> bool:
    """Whether one of the lines on which it was found asks this rule to leave it alone."""
    return any(
        line in silenced and (not silenced[line] or not silenced[line].isdisjoint({rule, name.upper()}))
        for line in range(lines[0], lines[1] + 1)
    )
