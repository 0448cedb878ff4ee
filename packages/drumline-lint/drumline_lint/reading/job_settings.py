"""What a launch says of the job that it is a part of: its rank, the number of members, where they
meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import ACCELERATE, PYTHON, Launch, launches, training_file
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Word

RANK = "node-rank"
SIZE = "nnodes"
ADDRESS = "master-addr"
PORT = "master-port"
_ACCELERATE_FLAGS = {
    RANK: "machine-rank",
    SIZE: "num-machines",
    ADDRESS: "main-process-ip",
    PORT: "main-process-port",
}
_VARIABLES = {RANK: "RANK", SIZE: "WORLD_SIZE", ADDRESS: "MASTER_ADDR", PORT: "MASTER_PORT"}


class JobSetting(NamedTuple):
    """A value, and how and where it is written."""

    name: str
    value: str = ""
    """Empty if it is not known."""
    word: Word | None = None
    place: TextRange | None = None

    @property
    def number(self) -> int | None:
        is_number = self.value.isascii() and self.value.isdigit() and len(self.value) < 7
        return int(self.value) if is_number else None


def job_setting(launch: Launch, what: str) -> JobSetting:
    """A flag of a launcher, or a variable of a rank that Python reads itself."""
    if launch.kind == PYTHON:
        name = _VARIABLES[what]
        assigned = variable(launch, name)
        if assigned is None:
            return JobSetting(name)
        word = assigned.assignment.value
        value = assigned.script.constant(word) or ""
        return JobSetting(name, value, word, assigned.assignment)
    flag_name = _ACCELERATE_FLAGS[what] if launch.kind == ACCELERATE else what
    flag = launch.flags.get(flag_name)
    written = f"--{flag_name}"
    if flag is None:
        return JobSetting(written)
    return JobSetting(written, launch.value(flag_name) or "", flag.value, flag.word)


def job_name(launch: Launch) -> tuple[str, ...] | None:
    """The same for members of one job; None if it is not known."""
    address = job_setting(launch, ADDRESS).value
    port = job_setting(launch, PORT).value
    training = training_file(launch)
    return (launch.kind, training, address, port) if address and training else None


def loop_ranks(launch: Launch) -> list[str]:
    """The ranks that a loop gives its launches; empty if they are not known."""
    loop = launch.command.loop
    word = job_setting(launch, RANK).word
    if loop is None or word is None or len(word.pieces) != 1 or word.pieces[0].text != loop.name:
        return []
    return outermost(launch.script).loop_values(loop) or []


def outermost(script: Script) -> Script:
    return script if script.outer is None else outermost(script.outer)


def link_node_scripts(scripts: Sequence[Script]) -> None:
    """Make siblings of the scripts of a folder that are one for each node: `node0.sh`,
    `node1.sh`."""
    groups: dict[tuple[Path, str], list[tuple[int, Script]]] = {}
    sizes: dict[tuple[Path, str], set[int | None]] = {}
    for script in scripts:
        for launch in launches(script) if script.container is None else ():
            group = (script.path.parent, training_file(launch))
            rank = job_setting(launch, RANK).number
            sizes.setdefault(group, set()).add(job_setting(launch, SIZE).number)
            groups.setdefault(group, []).append((-1 if rank is None else rank, script))
    for group, members in groups.items():
        members.sort(key=lambda member: member[0])
        is_whole = [rank for rank, _ in members] == list(range(len(members)))
        if group[1] and is_whole and sizes[group] == {len(members)}:
            for (_, before), (_, script) in itertools.pairwise(members):
                script.siblings = (*before.siblings, before)
