"""Output for people: findings with their line of code, statistics, rules, and the last line."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from drumline_lint.findings import (
    OWN_RULES,
    RULE_FAILED,
    UNREADABLE,
    Finding,
    Place,
    Rule,
    Severity,
)
from drumline_lint.linter import Report
from drumline_lint.terminal import one_line

# The last line


def summary_line(report: Report) -> str:
    """Such as: 2 errors, 1 warning in 2 of 14 files; 3 notes not shown (--severity note)."""
    parts = [_found(report)] if report.files_read or not report.problems else []
    if report.problems:
        parts.append(_problems(report))

    if report.fixed:
        parts.append(f"{report.fixed:,} fixed")
    if report.fixable:
        parts.append(f"{report.fixable:,} can be fixed (--fix)")

    if report.num_known:
        parts.append(f"{report.num_known:,} in the baseline")
    if report.num_unchanged:
        parts.append(f"{report.num_unchanged:,} on unchanged lines")
    if report.hidden:
        parts.append(f"{_sum(report.hidden)} not shown (--severity note)")

    return "; ".join(parts)


def _found(report: Report) -> str:
    """Such as: 2 errors, 1 warning in 2 of 14 files."""
    files = plural(report.files_read, "file")
    if not report.files_read:
        return "there is no file to read"
    if not report.findings:
        return f"nothing found in {files}"

    places = len({finding.place.path for finding in report.findings})
    return f"{_sum(report.findings)} in {places:,} of {files}"


def _sum(findings: Iterable[Finding]) -> str:
    """Such as: 2 errors, 1 warning."""
    counts = by_severity(findings)
    return ", ".join(plural(counts[severity], severity) for severity in counts if counts[severity])


def _problems(report: Report) -> str:
    """Such as: 1 file could not be read, 2 files could not be written, a rule failed 1 time."""
    paths = {problem.place.path for problem in report.problems if problem.rule == UNREADABLE.id}
    num_unwritten = len(paths & report.unwritten)
    num_unread = len(paths) - num_unwritten
    num_failed = sum(problem.rule == RULE_FAILED.id for problem in report.problems)

    parts = []
    if num_unread:
        parts.append(f"{plural(num_unread, 'file')} could not be read")
    if num_unwritten:
        parts.append(f"{plural(num_unwritten, 'file')} could not be written")
    if num_failed:
        parts.append(f"a rule failed {plural(num_failed, 'time')}")
    return ", ".join(parts)


# Counts


def plural(number: int, word: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def by_severity(findings: Iterable[Finding]) -> dict[Severity, int]:
    """How many there are of each severity, also of those with none: errors first."""
    counts = Counter(finding.severity for finding in findings)
    return {severity: counts[severity] for severity in reversed(Severity)}


def statistics(report: Report) -> dict[str, int]:
    """How often each rule found something, the most frequent first."""
    counts = Counter(finding.rule for finding in report.everything)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


# Findings

COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.NOTE: "36"}
WIDEST_LINE = 140
BEFORE_CARET = 60


def as_text(report: Report, *, colour: bool = False) -> str:
    """A block for each finding, and the closing line."""
    blocks = ["\n".join(_block(report, finding, colour)) for finding in report.everything]
    return _closed(blocks, report, colour)


def as_statistics(report: Report, rules: Mapping[str, Rule], *, colour: bool = False) -> str:
    """A line for each rule, the most frequent first, and the closing line.

    For example:

        12  warning  DL012  accumulation-without-no-sync  every micro-batch is reduced
         3  error    DL005  set-epoch-missing             every epoch has the same order
    """
    counts = statistics(report)
    width = max((len(f"{number:,}") for number in counts.values()), default=0)
    names = max((len(rules[number].name) for number in counts), default=0)
    lines = []

    for number, count in counts.items():
        rule = rules[number]
        severity = _painted(f"{rule.severity:<7}", COLOURS[rule.severity], colour)
        lines.append(
            f"{count:>{width},}  {severity}  {number}  {rule.name:<{names}}  {rule.summary}"
        )

    return _closed(lines, report, colour)


def _closed(lines: list[str], report: Report, colour: bool) -> str:
    """The lines, and the closing line below them."""
    return "\n".join([*lines, _painted(summary_line(report), "1", colour)]) + "\n"


def _block(report: Report, finding: Finding, colour: bool) -> Iterator[str]:
    """The lines of a finding.

    For example:

        train.py:40:9: warning DL028 clip-before-unscale: the gradients are still scaled
            | clip_grad_norm_(model.parameters(), 1.0)
            | ^~~~~~~~~~~~~~~
            fix: call scaler.unscale_(optimizer) before
    """
    paint = COLOURS[finding.severity]
    severity = _painted(finding.severity, paint, colour)
    place = _painted(_harmless(str(finding.place)), "1", colour)
    yield f"{place}: {severity} {finding.rule} {finding.name}: {_harmless(finding.message)}"

    line = report.line(finding.place)
    if line is not None and line.strip():
        yield from _shown(line, finding.place, paint, colour)

    yield f"    fix: {_harmless(finding.fix)}"


def _shown(line: str, place: Place, paint: str, colour: bool) -> Iterator[str]:
    """The line of code, shortened if it is very long, with the place marked below it.

    For example:

        | optimizer.step(closure)
        | ^~~~~~~~~~~~~~
    """
    start = place.column - 1
    end = place.end_column - 1 if place.end_line == place.line else len(line)

    first = 0 if len(line) <= WIDEST_LINE else max(0, start - BEFORE_CARET)
    visible = line[first : first + WIDEST_LINE]
    indent = 0 if first else len(visible) - len(visible.lstrip())

    before = _harmless(line[first + indent : start])
    marked = _harmless(line[start : min(max(end, start + 1), first + len(visible))]).rstrip()
    carets = "^" + "~" * (_width(marked) - 1)

    yield f"    | {_harmless(visible[indent:]).rstrip()}"
    yield f"    | {' ' * _width(before)}{_painted(carets, paint, colour)}"


def _harmless(text: str) -> str:
    """The text in one line, without characters that move the cursor."""
    return one_line(re.sub(r"\s", " ", text))


def _width(text: str) -> int:
    """The width on a terminal, where some characters take two columns and some none."""
    wide = sum(unicodedata.east_asian_width(character) in "FW" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _painted(text: str, paint: str, colour: bool) -> str:
    """The text in a colour of the terminal, or bold (`1`)."""
    return f"\x1b[{paint}m{text}\x1b[0m" if colour else text


# Rules


def as_list(rules: Iterable[Rule]) -> str:
    """A line for each rule.

    For example:

        DL106  warning  deprecated-launch  torch.distributed.launch is deprecated (--fix)
    """
    listed = list(rules)
    width = max(len(rule.name) for rule in listed)

    lines = []
    for rule in listed:
        fixable = " (--fix)" if rule.fixable else ""
        lines.append(
            f"{rule.id}  {rule.severity:<7}  {rule.name:<{width}}  {rule.summary}{fixable}\n"
        )
    return "".join(lines)


def as_explanation(rule: Rule) -> str:
    """Why it matters, what to do, wrong and right code, and how to silence it."""
    fixable = "; --fix can do it" if rule.fixable else ""
    parts = [
        f"{rule.id} {rule.name} ({rule.severity}{fixable})\n{rule.summary}",
        _wrapped(rule.why),
        _wrapped(f"Fix: {rule.fix}"),
    ]
    if rule.bad:
        parts += [f"Bad:\n\n{_indented(rule.bad)}", f"Good:\n\n{_indented(rule.good)}"]

    # An unreadable file has no line for a comment.
    on_line = "" if rule.id in OWN_RULES else f"`# noqa: {rule.id}` on the line, "
    parts.append(
        f'To silence it: {on_line}`ignore = ["{rule.id}"]` under [tool.drumline.lint] in\n'
        f"pyproject.toml, or --ignore {rule.id}."
    )
    parts.append(f"More: {rule.address}")
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    """The text in lines of 100 characters; paragraphs stay."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), 100) for part in text.split("\n\n"))


def _indented(code: str) -> str:
    return textwrap.indent(code.strip("\n"), "    ")
