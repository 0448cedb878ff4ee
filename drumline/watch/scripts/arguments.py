"""The arguments of a script, by name, and whether a difference in one is a node's own: its rank, host or address."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

NUMBERS = ("rank", "local_rank", "node_rank")
IS_OPTION = re.compile(r"--?[A-Za-z]")
ASSIGNMENT = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
# Not a part of 0.1 or of 1e3.
INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.])|(?<=[A-Za-z_-])\d+(?![\w.])")
FRACTION = re.compile(r"[-+]?\d*\.?\d+e[-+]?\d+", re.IGNORECASE)
OWN_NAMES = re.compile(
    r"(?:^|[-_.])(?:seed|port|hosts?|host[-_]?name|addr|address|ip|ifname|interface"
    r"|(?:log|out|output|tmp|temp|cache|scratch)s?(?:[-_.]?(?:dir|directory|folder|path|file|root))?"
    r"|(?:local|global|group|node|host|machine|process|worker|run|job|task)[-_.]?(?:rank|id))$"
    r"|^-*(?:rank|id)$"
)
"""Options whose value each node is expected to choose for itself. `--lora-rank` and `--out-channels` are none."""
NUMBERED = re.compile(r"(?:^|[-_.])(?<!per[-_.])(?:rank|node|machine|worker|gpu|device|index|idx|shard)$")
"""Options whose whole value may be the number of a rank or of its node."""
SECRET_NAMES = re.compile(r"keys?$|token$|secret|passw|passphrase|credential")


def by_name(words: Sequence[str]) -> dict[str, str]:
    """`--lr 0.1 --amp data x=1` as `{"--lr": "0.1", "--amp": "given", "argument 1": "data", "x": "1"}`."""
    found: dict[str, list[str]] = {}
    rest = list(words)
    num_places = 0
    while rest:
        word = rest.pop(0)
        if IS_OPTION.match(word):
            name, is_assigned, value = word.partition("=")
            if not is_assigned:
                takes_next = bool(rest) and not IS_OPTION.match(rest[0])
                value = rest.pop(0) if takes_next else "given"
        elif assigned := ASSIGNMENT.fullmatch(word):
            name, value = assigned.groups()
        else:
            num_places += 1
            name, value = f"argument {num_places}", word
        found.setdefault(name, []).append(value)
    return {name: " ".join(values) for name, values in found.items()}


def is_own(name: str, values: Sequence[str], owners: Sequence[Mapping[str, object]]) -> bool:
    """Whether the values, one for each rank, differ in no more than who the rank is. `owners`: the `host` of each, and
    NUMBERS."""
    if OWN_NAMES.search(name.lower()):
        return True
    places = [
        ADDRESS.sub("#", _without_host(value, str(owner["host"])))
        for value, owner in zip(values, owners, strict=True)
    ]
    if len({PurePath(place).name if "/" in place else place for place in places}) == 1:
        return True  # the same file on another disk
    if not NUMBERED.search(name.lower()) and not all(re.search("[A-Za-z/]", place) for place in places):
        return False  # `--epochs 1`, which may be the number of a rank by chance
    return any(
        len(
            {
                _without_number(place, owner[number], first)
                for place, owner in zip(places, owners, strict=True)
            }
        )
        == 1
        for number in NUMBERS
        for first in (0, 1)
    )


def is_secret(name: str) -> bool:
    """Whether the value of an option is for nobody's eyes: `--api-key`, `--password`."""
    return bool(SECRET_NAMES.search(name.lower()))


def _without_host(value: str, host: str) -> str:
    for name in (host, host.partition(".")[0]):
        value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "#", value) if name else value
    return value


def _without_number(value: str, number: object, first: int) -> str:
    if FRACTION.fullmatch(value):
        return value
    return INTEGER.sub(lambda found: "#" if int(found.group()) - first == number else found.group(), value)
