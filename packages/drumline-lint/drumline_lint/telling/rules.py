"""What the rules are: all of them in a line each, or one explained."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from drumline_lint.problems import OWN_RULES
from drumline_lint.rule import Rule


def as_list(rules: Iterable[Rule]) -> str:
    """A line for each."""
    listed = list(rules)
    width = max(len(rule.name) for rule in listed)
    return "".join(
        f"{rule.id}  {rule.severity:<7}  {rule.name:<{width}}  {rule.summary}{' (--fix)' if rule.fixable else ''}\n"
        for rule in listed
    )


def as_explanation(rule: Rule) -> str:
    """Why it bites, what to do, wrong and right code, and how to silence it."""
    fixable = "; --fix can mend it" if rule.fixable else ""
    parts = [f"{rule.id} {rule.name} ({rule.severity}{fixable})\n{rule.summary}", _wrapped(rule.why)]
    parts.append(_wrapped(f"Fix: {rule.fix}"))
    if rule.bad:
        parts += [f"Bad:\n\n{_indented(rule.bad)}", f"Good:\n\n{_indented(rule.good)}"]
    parts.append(_silence(rule))
    return "\n\n".join(parts) + "\n"


def _silence(rule: Rule) -> str:
    """What could not be read has no line that could ask for it."""
    if rule.id in OWN_RULES:
        return (
            f'To silence it: `ignore = ["{rule.id}"]` under [tool.drumline.lint] in pyproject.toml, '
            f"or --ignore {rule.id}."
        )
    return (
        f'To silence it: `# noqa: {rule.id}` on the line, `ignore = ["{rule.id}"]` under [tool.drumline.lint] in\n'
        f"pyproject.toml, or --ignore {rule.id}."
    )


def _wrapped(text: str) -> str:
    return "\n\n".join(textwrap.fill(" ".join(part.split()), 100) for part in text.split("\n\n"))


def _indented(code: str) -> str:
    return textwrap.indent(code.strip("\n"), "    ")
