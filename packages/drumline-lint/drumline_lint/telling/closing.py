"""The last line of a report: how much was found, in how many files, and what was not shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from drumline_lint.finding import Finding, Severity
from drumline_lint.problems import RULE_FAILED, UNREADABLE
from drumline_lint.run import Report


def counted(number: int, word: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def by_severity(findings: Iterable[Finding]) -> dict[Severity, int]:
    """The worst first."""
    counts = Counter(finding.severity for finding in findings)
    return {severity: counts[severity] for severity in reversed(Severity)}


def closing_line(report: Report) -> str:
    """Such as: 2 errors, 1 warning in 2 of 14 files; 3 notes not shown (--severity note)."""
    parts = [_found(report)] if report.files_read or not report.problems else []
    if report.problems:
        parts.append(_problems(report))
    if report.fixed:
        parts.append(f"{report.fixed:,} fixed")
    if report.fixable:
        parts.append(f"{report.fixable:,} can be fixed (--fix)")
    if report.hidden:
        parts.append(f"{_sum(by_severity(report.hidden))} not shown (--severity note)")
    return "; ".join(parts)


def statistics(report: Report) -> dict[str, int]:
    """How often each rule was met, the most frequent first."""
    counts = Counter(finding.rule for finding in report.everything)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _found(report: Report) -> str:
    files = counted(report.files_read, "file")
    if not report.files_read:
        return "there is no file to read"
    if not report.findings:
        return f"nothing found in {files}"
    places = len({finding.place.path for finding in report.findings})
    return f"{_sum(by_severity(report.findings))} in {places:,} of {files}"


def _problems(report: Report) -> str:
    paths = {said.place.path for said in report.problems if said.rule == UNREADABLE.id}
    unwritten = sum(path in report.unwritten for path in paths)
    unread = len(paths) - unwritten
    failed = sum(said.rule == RULE_FAILED.id for said in report.problems)
    said = [f"{counted(unread, 'file')} could not be read"] if unread else []
    said += [f"{counted(unwritten, 'file')} could not be written"] if unwritten else []
    said += [f"a rule failed {counted(failed, 'time')}"] if failed else []
    return ", ".join(said)


def _sum(counts: Mapping[Severity, int]) -> str:
    return ", ".join(counted(number, severity.value) for severity, number in counts.items() if number)
