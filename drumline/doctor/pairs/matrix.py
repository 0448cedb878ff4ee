"""The matrix of every way between hosts, as it fits a screen: numbers for a few hosts, a letter for each way for
dozens, and for hundreds only the rows in which something is wrong.

Rows send, columns receive.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.doctor.pairs.judge_speed import SLOW_SHARE, usual_speed
from drumline.doctor.pairs.survey import Edge, Survey
from drumline.terminal import one_line
from drumline.text import bit_rate, latency

MOST_IN_NUMBERS = 8
MOST_IN_LETTERS = 64
MOST_BAD_ROWS = 24
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
WORDS = {"M": "MTU hole", "N": "no name", "R": "no rendezvous", "C": "closed", "?": "?", "-": "absent"}
FINE = ".s"


@dataclass(frozen=True)
class Matrix:
    """Rows of cells under headings, for a table; or lines as they are."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]


def matrix(survey: Survey) -> Matrix:
    """The form that suits the number of hosts."""
    letters = all_letters(survey)
    notes = [_summary(survey, letters), *_legend(letters, len(survey.hosts))]
    names = [one_line(host.name) for host in survey.hosts]
    if len(names) <= MOST_IN_NUMBERS:
        headings = ["from \\ to", *names]
        rows = [[name, *_cells(survey, number, letters[number])] for number, name in enumerate(names)]
        return Matrix("every pair: bits per second, and latency", headings, rows, notes)
    if len(names) <= MOST_IN_LETTERS:
        rows = [[f"{number:>2}", name, letters[number]] for number, name in enumerate(names)]
        return Matrix("every pair", ["#", "from", f"to {_ruler(len(names))}"], rows, notes)
    return Matrix("rows with something wrong", ["from", "to"], _bad_rows(names, letters), notes)


def all_letters(survey: Survey) -> list[str]:
    """A text per host, with a letter per other one."""
    speeds = [edge.bytes_per_s for edge in survey.edges.values() if edge.bytes_per_s]
    slow_below = SLOW_SHARE * usual_speed(speeds) if speeds else 0.0
    numbers = range(len(survey.hosts))
    absent = [not host.is_here for host in survey.hosts]
    return [
        "".join(
            " " if source == target else "-" if absent[source] or absent[target]
            else _letter(survey.edges.get((source, target)), slow_below, survey.names_matter)
            for target in numbers
        )
        for source in numbers
    ]  # fmt: skip


def _letter(edge: Edge | None, slow_below: float, names_matter: bool) -> str:
    """The worst that is known about this way."""
    if edge is None:
        return "?"
    if edge.data not in (None, "open"):
        return "C"
    if edge.has_hole:
        return "M"
    if edge.addresses == [] and names_matter:
        return "N"
    if edge.meeting not in (None, "open"):
        return "R"
    if edge.bytes_per_s is None:
        return "?"
    return "s" if edge.bytes_per_s < slow_below else "."


def _cells(survey: Survey, source: int, letters: str) -> list[str]:
    return [
        _cell(survey.edges.get((source, target)), letter) if target != source else ""
        for target, letter in enumerate(letters)
    ]


def _cell(edge: Edge | None, letter: str) -> str:
    if edge is None or letter not in FINE or edge.latency_s is None or edge.bytes_per_s is None:
        return WORDS.get(letter, "?")
    slow = " slow" if letter == "s" else ""
    return f"{_short(bit_rate(edge.bytes_per_s))}{slow}\n{latency(edge.latency_s).replace(' ', '')}"


def _ruler(count: int) -> str:
    """`0         10        20`: the number of each column's host, every ten."""
    return "".join(f"{number:<10}" for number in range(0, count, 10))[:count].rstrip()


def _bad_rows(names: Sequence[str], letters: Sequence[str]) -> list[list[str]]:
    """What is the same in a whole column is said once, and not in every row."""
    columns = ["".join(column) for column in zip(*letters, strict=True)]
    whole = [len(set(column) - set(" -")) == 1 and bool(column.strip(" -.")) for column in columns]
    spelled = "".join(
        column.strip(" -")[0] if is_whole else "." for column, is_whole in zip(columns, whole, strict=True)
    )
    rows = [["every other", _spelled(spelled, names)]] if any(whole) else []
    masked = ["".join("." if skip else one for one, skip in zip(row, whole, strict=True)) for row in letters]
    bad = [(name, row) for name, row in zip(names, masked, strict=True) if row.strip(". -")]
    rows += [[name, _spelled(row, names)] for name, row in bad[:MOST_BAD_ROWS]]
    if len(bad) > MOST_BAD_ROWS:
        rows.append([f"and {len(bad) - MOST_BAD_ROWS} more", "see --json"])
    return rows


def _spelled(row: str, names: Sequence[str]) -> str:
    """`data ports closed: n001, n007, n009 and 12 more`."""
    parts = []
    for letter in (letter for letter in LETTERS if letter in row and letter not in ".-"):
        places = [names[place] for place, one in enumerate(row) if one == letter]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        parts.append(f"{LETTERS[letter]}: {', '.join(places[:3])}{more}")
    return "; ".join(parts)


def _summary(survey: Survey, letters: Sequence[str]) -> str:
    counts = Counter("".join(letters).replace(" ", ""))
    total = sum(counts.values())
    text = f"{total:,} way{'s' if total != 1 else ''}, {counts['.']:,} fine"
    speeds = [edge.bytes_per_s for edge in survey.edges.values() if edge.bytes_per_s]
    times = [edge.latency_s for edge in survey.edges.values() if edge.latency_s is not None]
    if speeds and times:
        rate = f"{bit_rate(statistics.median(speeds))} (slowest {bit_rate(min(speeds))})"
        text += f"; median {rate}, {latency(statistics.median(times))} (longest {latency(max(times))})"
    return text


def _legend(letters: Sequence[str], count: int) -> list[str]:
    if not MOST_IN_NUMBERS < count <= MOST_IN_LETTERS:
        return []
    used = set("".join(letters))
    return ["; ".join(f"{letter} {words}" for letter, words in LETTERS.items() if letter in used)]


def _short(rate: str) -> str:
    """`9.4G`: the table says what it is."""
    return rate.removesuffix("bit/s").replace(" ", "")
