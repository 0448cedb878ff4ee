"""Which hosts a job runs on (`--hosts a,b:4,c`, or a hostfile of `host slots=N` lines) and how many
of them it needs.

A host's name becomes part of commands, so a name that a shell or ssh could misread is rejected. All
mistakes are listed at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.base.errors import UsageError, as_list
from drumline.base.text import plural
from drumline.base.untrusted import TEXT_BYTES, read_regular, whole_number

NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
NAME_FORM = "a host is `name`, `user@name` or an IPv4 address: letters, digits, dots, dashes and underscores"
LINE = re.compile(r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")
LINE_FORM = "a line is `host` or `host slots=N`"
COUNTS = re.compile(r"(?:(?P<least>[0-9]{1,9}):)?(?P<most>[0-9]{0,9})")
Entry = tuple[str, str, str | None]
"""Where it is written, the name, and the slots."""
COUNTS_FORM = "a number of nodes (3), or the smallest and the largest (2:3)"


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches."""

    name: str
    """As ssh takes it: `node-a`, or `me@node-a`."""
    slots: int | None = None

    @property
    def address(self) -> str:
        """Its name or address for the other hosts."""
        return self.name.rpartition("@")[2]


def listed_hosts(text: str | None, file: str | None) -> list[Host]:
    """Those of --hosts, or else of --hostfile."""
    return hosts_from_file(Path(str(file))) if text is None else hosts_from_flag(text)


def hosts_from_flag(text: str) -> list[Host]:
    """The hosts of `a,me@b:4`."""
    return _checked(_parts(text, "--hosts"))


def spares_from_flag(text: str, hosts: Sequence[Host]) -> list[Host]:
    """The hosts of `--spare d,e`; none of them may be a host of the job."""
    taken = [("the list of hosts", host.name, None) for host in hosts]
    return _checked([*taken, *_parts(text, "--spare")])[len(taken) :]


def _parts(text: str, where: str) -> list[Entry]:
    """The entries of a flag, not checked yet."""
    parts = (part.strip().partition(":") for part in text.split(","))
    return [(where, name, slots if colon else None) for name, colon, slots in parts]


def hosts_from_file(path: Path) -> list[Host]:
    """The hosts of a hostfile; raises with all that is wrong, each with its line."""
    entries: list[Entry] = []
    problems = []
    lines = read_lines(path, f"the hostfile {path}", flag="--hostfile")
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        description = line.partition("#")[0].strip()
        match = LINE.fullmatch(description)
        if match:
            entries.append((where, match["name"], match["slots"]))
        elif description:
            problems.append(f"{where}: {description!r} is not understood; {LINE_FORM}")

    if not entries and not problems:
        problems.append(f"{path}: no host is in it; {LINE_FORM}")
    return _checked(entries, problems)


def read_lines(path: Path, what: str, *, flag: str) -> list[str]:
    """The lines of a small text file that the user named with this flag."""
    try:
        return read_regular(path, most=TEXT_BYTES, follow_links=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{what} cannot be read: {reason}", next_step=f"check the path of {flag}"
        ) from error


def wrong_name(name: str) -> str | None:
    """What is wrong with the name of a host; None: nothing."""
    if not name:
        return "a host's name is missing"
    if name.startswith("-"):
        return f"{name!r}: a host's name does not start with a dash; ssh would read it as a flag"
    return None if NAME.fullmatch(name) else f"{name!r} is not a host's name; {NAME_FORM}"


def wrong_port(port: str) -> str | None:
    """The same for a port."""
    return None if 0 < (whole_number(port) or 0) < 65536 else f"{port!r} is not a port"


def _checked(entries: Sequence[Entry], problems: Sequence[str] = ()) -> list[Host]:
    """The hosts; raises with all that is wrong with them, after these problems."""
    addresses = set()
    problems = list(problems)
    hosts = []
    for where, name, slots in entries:
        if wrong := wrong_name(name):
            problems.append(f"{where}: {wrong}")
            continue

        num_slots = None if slots is None else whole_number(slots)
        if slots is not None and not num_slots:
            problems.append(
                f"{where}: {name} has {slots!r} slots; a whole number from 1 up is needed"
            )

        host = Host(name, num_slots)
        hosts.append(host)
        address = host.address.lower()
        if address in addresses:
            problems.append(f"{where}: {address} is listed twice; list it once, with all its slots")
        addresses.add(address)

    if problems:
        heading = f"{plural(len(problems), 'problem')} in the list of hosts:"
        raise UsageError(as_list(heading, problems))

    return hosts


def read_counts(text: str) -> tuple[int | None, int | None] | None:
    """The minimum and the maximum of `3`, `2:3` or `2:`; None for anything else."""
    match = COUNTS.fullmatch(text.strip())
    if match is None or not text.strip():
        return None

    least = int(match["least"]) if match["least"] else None
    most = int(match["most"]) if match["most"] else None
    if 0 in (least, most) or (least and most and least > most):
        return None
    return least, most


def wrong_counts(text: str) -> str | None:
    """The same for `--nnodes`."""
    if read_counts(text):
        return None
    return f"--nnodes: {text!r} is not understood; give {COUNTS_FORM}"


def least_nodes(text: str | None, num_nodes: int, *, known_from: str) -> int | None:
    """`--nnodes` for a job whose number of nodes is known: how many of them are enough, None for
    all."""
    counts = None if text is None else read_counts(text)
    if counts is None:
        return None

    least, most = counts
    if (most or num_nodes) != num_nodes or (least or 1) > num_nodes:
        there_are = "there is" if num_nodes == 1 else "there are"
        raise UsageError(
            f"--nnodes is {text}, but {there_are} {num_nodes} in {known_from}",
            next_step=f"give `--nnodes MIN:`, with a MIN from 1 to {num_nodes}",
        )

    return least
