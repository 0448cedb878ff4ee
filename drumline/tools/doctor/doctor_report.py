"""The doctor's report: the matrix, each finding with its fix, and the result; or all
as JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.base.text import (
    bit_rate,
    columns,
    join_names,
    latency,
    make_console,
    one_line,
    plural,
    show_lines,
)
from drumline.tools.doctor.finding import Finding, sorted_findings
from drumline.tools.doctor.pairs.pair_checks import SLOW_SHARE
from drumline.tools.doctor.pairs.survey import OPEN, Edge, Pair, Survey

# One cause on hundreds of hosts is not printed hundreds of times.
MAX_OF_A_CHECK = 12
COLOURS = {
    "problem": "bold red",
    "warning": "yellow",
    "note": "dim",
    "result": "bold",
}


def as_json(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    facts: Mapping[str, Any] | None = None,
    collectives: Any = None,
    task: Any = None,
) -> str:
    """The whole report; parts that were not examined are left out."""
    parts = {
        "result": result_line(findings),
        "findings": [finding.as_json() for finding in sorted_findings(findings)],
        "facts": facts,
        "network": survey and survey.as_json(),
        "collectives": collectives,
        "task": task,
    }
    return json.dumps({name: part for name, part in parts.items() if part is not None})


def report(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    notes: Sequence[str] = (),
    is_terminal: bool = False,
) -> None:
    """On the screen: with colours on a terminal."""
    plain = [*notes]
    if survey is not None and len(survey.hosts) > 1:
        plain = [*matrix_lines(survey), *notes]

    lines = [("", line) for line in plain]
    lines += finding_lines(findings)
    lines.append(("result", result_line(findings)))

    if not is_terminal:
        show_lines(text for _, text in lines)
        return

    console = make_console()
    for level, text in lines:
        # It can be copied: the terminal wraps it, without line breaks in the text.
        console.print(one_line(text), style=COLOURS.get(level), soft_wrap=True)


def finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Level and text of each line, problems first; a limited number for each check.

    A problem is two lines: `problem: c: torch differs across hosts: ...`, then `  fix: install ...`.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for finding in once_each(findings):
        kind = (finding.level, finding.check)
        counts[kind] += 1
        if counts[kind] <= MAX_OF_A_CHECK:
            yield finding.level, finding.line()
            if finding.fix:
                yield "fix", f"  fix: {finding.fix}"

    for (level, check), count in counts.items():
        num_hidden = count - MAX_OF_A_CHECK
        if num_hidden > 0:
            yield level, f"{level}: {check}: {num_hidden} more of this kind; --json has all"


def once_each(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the same finding on several hosts: `warning: a, b and c: the clock is not synchronized`."""
    places: dict[Finding, list[str]] = {}
    for finding in sorted_findings(findings):
        places.setdefault(replace(finding, where=""), []).append(finding.where)

    return [replace(finding, where=join_names(where)) for finding, where in places.items()]


def result_line(findings: Sequence[Finding]) -> str:
    """`result: ready to train, with 2 warnings`, or `result: not ready to train: 1 problem`."""
    counts = Counter(finding.level for finding in once_each(findings))
    counted = join_names(
        plural(counts[level], level) for level in ("problem", "warning") if counts[level]
    )
    if counts["problem"]:
        return f"result: not ready to train: {counted}"

    return f"result: ready to train, with {counted}" if counted else "result: ready to train"


# The matrix of all links, sized for a screen: numbers for a few hosts, one letter per link for dozens.
# Rows send, columns receive.

MAX_IN_NUMBERS = 8
LETTERS = {
    ".": "fine",
    "s": "slow",
    "M": "large messages vanish",
    "N": "name does not resolve",
    "R": "rendezvous port closed",
    "C": "data ports closed",
    "?": "not measured",
    "-": "host absent",
}
WORDS = {
    "M": "MTU hole",
    "N": "no name",
    "R": "no rendezvous",
    "C": "closed",
    "?": "?",
    "-": "absent",
    " ": "",
}
UNTESTED = Edge()


def matrix_lines(survey: Survey) -> Iterator[str]:
    """A table of all links; a row is a line, so that it can be searched:

    from \\ to  a          b
    a                     9.4G 52us
    b          1G slow 52us
    """
    letters = all_letters(survey)
    names = [one_line(host.name) for host in survey.hosts]
    if len(names) <= MAX_IN_NUMBERS:
        yield "every pair: bits per second, and latency"
        yield from columns([*_rows_in_numbers(survey, names, letters)])
        yield _summary(survey, letters)
        return

    yield "every pair"
    # The number of each column's host, every ten: `0         10        20`.
    ruler = "".join(f"{number:<10}" for number in range(0, len(names), 10))
    rows = [["#", "from", f"to {ruler[: len(names)].rstrip()}"]]
    rows += [[f"{number:>2}", name, letters[number]] for number, name in enumerate(names)]
    yield from columns(rows)
    yield _summary(survey, letters)

    used = set("".join(letters))
    yield "; ".join(f"{letter} {words}" for letter, words in LETTERS.items() if letter in used)


def _rows_in_numbers(
    survey: Survey, names: Sequence[str], letters: Sequence[str]
) -> Iterator[list[str]]:
    """The table for a few hosts: speed and latency of each link, or what is wrong with it."""
    yield ["from \\ to", *names]
    for source, name in enumerate(names):
        row = [name]
        for target, letter in enumerate(letters[source]):
            if letter in WORDS:
                row.append(WORDS[letter])
            else:
                row.append(_cell(survey.edges[source, target], letter))

        yield row


def all_letters(survey: Survey) -> list[str]:
    """The rows of the matrix: a letter of LETTERS for each link."""
    slow_below = SLOW_SHARE * survey.usual_speed()
    numbers = range(len(survey.hosts))
    return [
        "".join(_letter(survey, (source, target), slow_below) for target in numbers)
        for source in numbers
    ]


def _letter(survey: Survey, pair: Pair, slow_below: float) -> str:
    """The first thing that is wrong with a link, or `.`."""
    source, target = pair
    if source == target:
        return " "
    if survey.hosts[source].absent is not None or survey.hosts[target].absent is not None:
        return "-"

    edge = survey.edges.get(pair, UNTESTED)
    if edge.data not in (None, OPEN):
        return "C"
    if edge.has_hole:
        return "M"
    if edge.addresses == [] and survey.by_ssh:
        return "N"

    if edge.rendezvous not in (None, OPEN):
        return "R"
    if edge.bytes_per_s is None:
        return "?"

    return "s" if edge.bytes_per_s < slow_below else "."


def _cell(edge: Edge, letter: str) -> str:
    """`9.4G 52us` or `1G slow 52us`, of a link that was measured."""
    rate = bit_rate(edge.bytes_per_s or 0.0).removesuffix("bit/s").replace(" ", "")
    slow = " slow" if letter == "s" else ""
    return f"{rate}{slow} {latency(edge.latency_s or 0.0).replace(' ', '')}"


def _summary(survey: Survey, letters: Sequence[str]) -> str:
    """How many links are fine, their speed and their latency: `6 links, 5 fine; median 9.4 Gbit/s (slowest
    940 Mbit/s), 52 us (longest 1.2 ms)`."""
    counts = Counter("".join(letters).replace(" ", ""))
    text = f"{plural(sum(counts.values()), 'link')}, {counts['.']:,} fine"
    speeds = [edge.bytes_per_s for edge in survey.edges.values() if edge.bytes_per_s]
    times = [edge.latency_s for edge in survey.edges.values() if edge.latency_s is not None]

    if speeds and times:
        rate = f"{bit_rate(statistics.median(speeds))} (slowest {bit_rate(min(speeds))})"
        usual_time = latency(statistics.median(times))
        text += f"; median {rate}, {usual_time} (longest {latency(max(times))})"

    return text
