"""For GitHub's workflows: commands that become annotations beside the lines of a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.run import Report
from drumline_lint.telling.closing import closing_line

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def as_github(report: Report) -> str:
    """A command for each, and the closing line for the log."""
    return "\n".join([*map(_command, report.everything), closing_line(report)]) + "\n"


def _command(finding: Finding) -> str:
    properties = ",".join(f"{name}={_escaped_property(value)}" for name, value in _properties(finding))
    cell = "" if finding.place.cell is None else f"cell {finding.place.cell}, line {finding.place.line}: "
    message = _escaped(f"{cell}{finding.message}\nfix: {finding.fix}")
    return f"::{COMMANDS[finding.severity]} {properties}::{message}"


def _properties(finding: Finding) -> Iterator[tuple[str, str]]:
    place = finding.place
    yield "file", place.path
    # A line within a cell is no line of the notebook's file.
    if place.cell is None:
        yield "line", str(place.line)
        yield "col", str(place.column)
        yield "endLine", str(place.end_line)
        if place.end_line == place.line:
            yield "endColumn", str(place.end_column)
    else:
        yield "line", "1"
    yield "title", f"{finding.rule} {finding.name}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
