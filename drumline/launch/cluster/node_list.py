"""Slurm's shorthand for the names of hosts: `gpu[007-009,12],login` is gpu007, gpu008, gpu009, gpu12 and login."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_NAMES = 10_000


def node_names(node_list: str) -> list[str]:
    """All names, in their order; none if the text is not such a list."""
    names: list[str] = []
    # A comma inside brackets parts numbers, one outside parts names.
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list):
        for name in _spelled_out(word):
            if len(names) == MOST_NAMES:
                return []
            names.append(name)
    return names


def _spelled_out(word: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[]*)\[([\d,-]+)\](.*)", word)
    if match is None:
        yield word
        return
    prefix, numbers, rest = match.groups()
    for number in _numbers(numbers):
        for end in _spelled_out(rest):
            yield f"{prefix}{number}{end}"


def _numbers(text: str) -> Iterator[str]:
    """`007-009,12`, with the zeros that the names have."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
