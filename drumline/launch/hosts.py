"""Which hosts a job runs on (`--hosts a,b:4,c`, or a hostfile of `host slots=N` lines) and how many
of them it needs.

A host's name becomes part of commands, so a name that a shell or ssh could misread is rejected. All
mistakes are listed at once.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from drumline.base.errors import UsageError, as_list
from drumline.base.text import plural
from drumline.base.untrusted import TEXT_BYTES, read_regular, whole_number

NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
NAME_FORM = (
    "a host is `name`, `user@name` or an address, IPv6 as [fd00::1]: "
    "letters, digits, dots, dashes and underscores"
)
# The last `:N` of an entry of --hosts; an IPv6 address is in brackets.
PART = re.compile(r"(?P<name>[^\[\]:]*\[[^\[\]]*\]|[^:]*)(?::(?P<slots>.*))?")
BRACKETS = re.compile(r"(?P<user>[^\[\]]*@)?\[(?P<address>[^\[\]]*:[^\[\]]*)\]")
OPTION = re.compile(r"\s+(slots|address|user|python|folder)\s*=\s*(\S+)")
LINE = re.compile(rf"(?P<name>\S+)(?P<options>(?:{OPTION.pattern})*)")
LINE_FORM = "a line is `host` or `host slots=N`, and may have address=, user=, python= and folder="
COUNTS = re.compile(r"(?:(?P<least>[0-9]{1,9}):)?(?P<most>[0-9]{0,9})")
COUNTS_FORM = "a number of nodes (3), or the smallest and the largest (2:3)"


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches."""

    name: str
    """As ssh takes it: `node-a`, or `me@node-a`."""
    slots: int | None = None
    inner_address: str = ""
    """Its address for the other hosts, where that is not its name: ssh may know it by an alias."""
    python: str = ""
    """The Python to run there, and the folder; empty: those of the launch."""
    folder: str = ""

    @property
    def address(self) -> str:
        """Its name or address for people, and for the other hosts if they know it."""
        return self.name.rpartition("@")[2]

    def __str__(self) -> str:
        """As `--hosts` takes it."""
        return (
            self.name.replace(self.address, f"[{self.address}]") if ":" in self.name else self.name
        )

    @property
    def network_address(self) -> str:
        """Where the other hosts reach it."""
        return self.inner_address or self.address


class Entry(NamedTuple):
    """A host as it is written."""

    where: str
    name: str
    options: Mapping[str, str] = {}


def listed_hosts(text: str | None, file: str | None) -> list[Host]:
    """Those of --hosts, or else of --hostfile."""
    return hosts_from_file(Path(str(file))) if text is None else hosts_from_flag(text)


def hosts_from_flag(text: str) -> list[Host]:
    """The hosts of `a,me@b:4`."""
    return _checked(_parts(text, "--hosts"))


def with_addresses(hosts: Sequence[Host], text: str) -> list[Host]:
    """The hosts with their addresses of `--addresses 10.0.0.1,10.0.0.2`."""
    addresses = [address.strip().strip("[]") for address in text.split(",")]
    problems = [wrong for address in addresses if (wrong := wrong_name(address))]
    if len(addresses) != len(hosts):
        problems = [f"it has {len(addresses)}, and there are {plural(len(hosts), 'host')}"]
    if problems:
        raise UsageError(
            f"--addresses: {problems[0]}", next_step="give one for each host, in order"
        )
    return [
        replace(host, inner_address=address) for host, address in zip(hosts, addresses, strict=True)
    ]


def spares_from_flag(text: str, hosts: Sequence[Host]) -> list[Host]:
    """The hosts of `--spare d,e`; none of them may be a host of the job."""
    taken = [Entry("the list of hosts", host.name) for host in hosts]
    return _checked([*taken, *_parts(text, "--spare")])[len(taken) :]


def _parts(text: str, where: str) -> list[Entry]:
    """The entries of a flag, not checked yet."""
    entries = []
    for part in text.split(","):
        name, _, slots = part.strip().partition(":")
        if match := PART.fullmatch(part.strip()):
            name = match["name"]
            slots = match["slots"]
        entries.append(Entry(where, name, {} if slots is None else {"slots": slots}))
    return entries


def hosts_from_file(path: Path) -> list[Host]:
    """The hosts of a hostfile; raises with all that is wrong, each with its line."""
    entries: list[Entry] = []
    problems = []
    text = read_flag_file(path, f"the hostfile {path}", flag="--hostfile")
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        description = line.partition("#")[0].strip()
        match = LINE.fullmatch(description)
        if match:
            options = dict(OPTION.findall(match["options"]))
            user = f"{options['user']}@" if "user" in options else ""
            entries.append(Entry(where, f"{user}{match['name']}", options))
        elif description:
            problems.append(f"{where}: {description!r} is not understood; {LINE_FORM}")

    if not entries and not problems:
        problems.append(f"{path}: no host is in it; {LINE_FORM}")
    return _checked(entries, problems)


def read_flag_file(path: Path, what: str, *, flag: str, most: int = TEXT_BYTES) -> str:
    """A small text file that the user named with this flag."""
    try:
        return read_regular(path, most=most, follow_links=True).decode()
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
    if NAME.fullmatch(name) or _is_ipv6(name):
        return None
    return f"{name!r} is not a host's name; {NAME_FORM}"


def _is_ipv6(name: str) -> bool:
    """Whether it is an IPv6 address, perhaps with a user; a zone (`%eth0`) means another network on
    each host."""
    user, separator, address = name.rpartition("@")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return "%" not in address and (not separator or NAME.fullmatch(user) is not None)


def wrong_port(port: str) -> str | None:
    """The same for a port."""
    return None if 0 < (whole_number(port) or 0) < 65536 else f"{port!r} is not a port"


def _checked(entries: Sequence[Entry], problems: Sequence[str] = ()) -> list[Host]:
    """The hosts; raises with all that is wrong with them, after these problems."""
    addresses = set()
    problems = list(problems)
    hosts = []
    for where, text, options in entries:
        brackets = BRACKETS.fullmatch(text)
        name = f"{brackets['user'] or ''}{brackets['address']}" if brackets else text
        inner_address = options.get("address", "")
        if wrong := wrong_name(name) or (inner_address and wrong_name(inner_address)):
            problems.append(f"{where}: {wrong}")
            continue

        slots = options.get("slots")
        num_slots = None if slots is None else whole_number(slots)
        if slots is not None and not num_slots:
            problems.append(
                f"{where}: {name} has {slots!r} slots; a whole number from 1 up is needed"
            )

        python = options.get("python", "")
        host = Host(name, num_slots, inner_address, python, options.get("folder", ""))
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
