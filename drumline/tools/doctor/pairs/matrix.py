"""The matrix of all links, sized for a screen: numbers for a few hosts, one letter per link for
dozens. Rows send, columns receive.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.base.terminal import one_line
from drumline.base.text import bit_rate, latency, plural
from drumline.tools.doctor.pairs.pair_checks import SLOW_SHARE
from drumline.tools.doctor.pairs.survey import OPEN, Edge, Survey

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
}


@dataclass(frozen=True)
class Matrix:
    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: list[str]


def matrix(survey: Survey) -> Matrix:
    letters = all_letters(survey)
    names = [one_line(host.name) for host in survey.hosts]
    notes = [_summary(survey, letters)]
    if len(names) <= MAX_IN_NUMBERS:
        rows = [
            [
                name,
                *(
                    _cell(survey.edges.get((source, target)), letter)
                    for target, letter in enumerate(row)
                ),
            ]
            for source, (name, row) in enumerate(zip(names, letters, strict=True))
        ]
        return Matrix(
            "every pair: bits per second, and latency", ["from \\ to", *names], rows, notes
        )
    used = set("".join(letters))
    notes.append(
        "; ".join(f"{letter} {words}" for letter, words in LETTERS.items() if letter in used)
    )
    rows = [[f"{number:>2}", name, letters[number]] for number, name in enumerate(names)]
    # The number of each column's host, every ten: `0         10        20`.
    ruler = "".join(f"{number:<10}" for number in range(0, len(names), 10))
    return Matrix("every pair", ["#", "from", f"to {ruler[: len(names)].rstrip()}"], rows, notes)


def all_letters(survey: Survey) -> list[str]:
    slow_below = SLOW_SHARE * survey.usual_speed()
    numbers = range(len(survey.hosts))
    present = set(survey.present())

    def letter(source: int, target: int) -> str:
        if source == target:
            return " "
        if source not in present or target not in present:
            return "-"
        return _letter(survey.edges.get((source, target)), slow_below, survey.by_ssh)

    return ["".join(letter(source, target) for target in numbers) for source in numbers]


def _letter(edge: Edge | None, slow_below: float, by_ssh: bool) -> str:
    if edge is None:
        return "?"
    if edge.data not in (None, OPEN):
        return "C"
    if edge.has_hole:
        return "M"
    if edge.addresses == [] and by_ssh:
        return "N"
    if edge.rendezvous not in (None, OPEN):
        return "R"
    if edge.bytes_per_s is None:
        return "?"
    return "s" if edge.bytes_per_s < slow_below else "."


def _cell(edge: Edge | None, letter: str) -> str:
    """`9.4G 52us`, or a word."""
    if edge is None or letter not in ".s" or edge.latency_s is None or edge.bytes_per_s is None:
        return WORDS.get(letter, "" if letter == " " else "?")
    rate = bit_rate(edge.bytes_per_s).removesuffix("bit/s").replace(" ", "")
    slow = " slow" if letter == "s" else ""
    return f"{rate}{slow}\n{latency(edge.latency_s).replace(' ', '')}"


def _summary(survey: Survey, letters: Sequence[str]) -> str:
    counts = Counter("".join(letters).replace(" ", ""))
    text = f"{plural(sum(counts.values()), 'link')}, {counts['.']:,} fine"
    speeds = [edge.bytes_per_s for edge in survey.edges.values() if edge.bytes_per_s]
    times = [edge.latency_s for edge in survey.edges.values() if edge.latency_s is not None]
    if speeds and times:
        rate = f"{bit_rate(statistics.median(speeds))} (slowest {bit_rate(min(speeds))})"
        text += (
            f"; median {rate}, {latency(statistics.median(times))} (longest {latency(max(times))})"
        )
    return text
