"""Which hosts a job runs on: `--hosts a,b:4,c`, or a hostfile with `host slots=N` on each line.

Host names end up in commands, so one that a shell or ssh could take for something else is refused. All mistakes are
told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drumline.errors import UsageError, as_list
from drumline.untrusted import TEXT_BYTES, read_regular, whole_number

NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
LINE = re.compile(r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")
FORM = "a host is `name`, `user@name` or an IPv4 address: letters, digits, dots, dashes and underscores"
LINE_FORM = "a line is `host` or `host slots=N`"


@dataclass(frozen=True)
class Host:
    """One machine of the job."""

    name: str
    """As ssh takes it: `node-a`, or `me@node-a`."""
    slots: int | None = None
    """How many ranks it takes; None when the user did not say."""

    @property
    def address(self) -> str:
        """What the other hosts call it."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class _Entry:
    where: str
    name: str
    slots: str | None


def hosts_from_flag(text: str) -> list[Host]:
    """The hosts of `--hosts a,b:4,c`."""
    return _settled(_entries(text, "--hosts"), [])


def spares_from_flag(text: str, hosts: Iterable[Host]) -> list[Host]:
    """The hosts of `--spare d,e`, none of which is one of the job's already."""
    taken = [_Entry("the list of hosts", host.name, None) for host in hosts]
    return _settled([*taken, *_entries(text, "--spare")], [])[len(taken) :]


def _entries(text: str, where: str) -> list[_Entry]:
    parts = (part.strip().partition(":") for part in text.split(","))
    return [_Entry(where, name, slots if colon else None) for name, colon, slots in parts]


def hosts_from_file(path: Path) -> list[Host]:
    """The hosts of a hostfile."""
    try:
        lines = read_regular(path, most=TEXT_BYTES, follow_links=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"the hostfile {path} cannot be read: {reason}", next_step="check the path of --hostfile"
        ) from error
    entries, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not (words := line.partition("#")[0].strip()):
            continue
        if found := LINE.fullmatch(words):
            entries.append(_Entry(f"{path}:{number}", found["name"], found["slots"]))
        else:
            problems.append(f"{path}:{number}: {words!r} is not understood; {LINE_FORM}")
    if not entries and not problems:
        problems.append(f"{path}: no host is in it; {LINE_FORM}")
    return _settled(entries, problems)


def wrong_name(name: str) -> str | None:
    """What is wrong with a host's name, if anything."""
    if not name:
        return "a host's name is missing"
    if name.startswith("-"):
        return f"{name!r}: a host's name does not start with a dash; ssh would take it for a flag"
    return None if NAME.fullmatch(name) else f"{name!r} is no host's name; {FORM}"


def _settled(entries: Iterable[_Entry], problems: list[str]) -> list[Host]:
    entries = list(entries)
    problems = [*problems, *_problems(entries)]
    if problems:
        # Lines of a file are told in their order, whatever is wrong with each.
        problems.sort(key=_line_number)
        count = len(problems)
        heading = f"{count} problem{'s' if count > 1 else ''} in the list of hosts:"
        raise UsageError(as_list(heading, problems))
    return [Host(entry.name, int(entry.slots) if entry.slots else None) for entry in entries]


def _problems(entries: Iterable[_Entry]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for entry in entries:
        if wrong := wrong_name(entry.name):
            yield f"{entry.where}: {wrong}"
            continue
        if entry.slots is not None and not whole_number(entry.slots):
            yield f"{entry.where}: {entry.name} has {entry.slots!r} slots; a whole number from 1 up is needed"
        address = entry.name.rpartition("@")[2].lower()
        if address in seen:
            before = "" if seen[address] == entry.where else f" (first in {seen[address]})"
            yield f"{entry.where}: {address} is there twice{before}; give it once, with all its slots"
        seen.setdefault(address, entry.where)


def _line_number(problem: str) -> int:
    found = re.match(r".*?:(\d+): ", problem)
    return int(found[1]) if found else 0
