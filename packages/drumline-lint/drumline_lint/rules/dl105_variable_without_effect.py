"""DL105: a variable of NCCL that nobody gets to see, or that nobody reads."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.nccl_names import GIVEN_UP, NCCL, OLD_NAMES, TORCH
from drumline_lint.reading.shell import Assignment, Script

RULE = rule("DL105")
PREFIXES = ("NCCL_", "TORCH_NCCL_")
NEAR = 0.9
FARTHEST = 2
# These start nothing that could read a variable.
HARMLESS = {":", "cd", "date", "echo", "exit", "export", "printf", "set", "sleep", "true", "unset", "wait"}
ADDRESS = re.compile(r"[=^]*\d+\.\d+\.\d+\.\d+(?::\d+)?")
# One is what switches something off.
SWITCHES = {"NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"}
# What NCCL_DEBUG_SUBSYS chooses from is written at these levels only.
TALKING = {"INFO", "TRACE", "ABORT"}


@dataclass(frozen=True)
class _ScriptFacts:
    """What the rest of the script has to do with its variables; found once for all of them."""

    times_named: Counter[str]
    read_here: frozenset[str]
    last_start: int
    """Where the last launcher is started; -1 when there is none."""
    last_reader: int
    """The last command that might start something that reads a variable."""
    started: str
    """What was started last, where nothing can start it again; empty otherwise."""
    exports_all: bool
    debug_level: str
    """That of NCCL_DEBUG, where it is plain."""


def check_shell(script: Script) -> Iterator[Finding]:
    """Each variable for one reason at most."""
    wanted = [one for one in script.assignments if one.name.startswith(PREFIXES) and not one.is_appended]
    around = _look_around(script) if wanted else None
    for assignment in wanted:
        assert around is not None
        said = (
            _misnamed(script, assignment, around)
            or _not_exported(script, assignment, around)
            or _too_late(assignment, around)
            or _matches_nothing(script, assignment)
            or _is_no_number(script, assignment)
            or _filters_nothing(assignment, around)
        )
        if said:
            yield RULE.at(script, assignment, said[0], fix=said[1])


def _look_around(script: Script) -> _ScriptFacts:
    assigning = {one.command.start for one in script.assignments if not one.is_for_command}
    readers = [
        command.start
        for command in script.commands
        if command.start not in assigning and command.words[0].plain not in HARMLESS
    ]
    found = launches(script)
    may_come_again = "()" in script.text or "function " in script.text
    is_plain = bool(found) and not may_come_again and not any(one.command.is_conditional for one in found)
    return _ScriptFacts(
        times_named=Counter(re.findall(r"\b(?:TORCH_)?NCCL_\w+", script.text)),
        read_here=frozenset(re.findall(r"\$\{?((?:TORCH_)?NCCL_\w+)", script.text)),
        last_start=max((launch.command.start for launch in found), default=-1),
        last_reader=max(readers, default=-1),
        started=found[-1].kind if is_plain else "",
        exports_all=_exports_all(script),
        debug_level=_debug_level(script),
    )


def _exports_all(script: Script) -> bool:
    """`set -a`."""
    for command in script.commands:
        words = [word.plain or "" for word in command.words]
        if words[0] == "set" and any(re.fullmatch(r"-\w*a\w*|allexport", word) for word in words[1:]):
            return True
    return False


def _debug_level(script: Script) -> str:
    levels = [one for one in script.assignments if one.name == "NCCL_DEBUG"]
    if len(levels) != 1 or levels[0].command.is_conditional:
        return ""
    return (script.constant(levels[0].value) or "").upper()


def _misnamed(script: Script, assignment: Assignment, around: _ScriptFacts) -> tuple[str, str] | None:
    name = assignment.name
    if name in NCCL or name in TORCH or name in OLD_NAMES or name in around.read_here:
        return None
    if name in GIVEN_UP:
        instead = GIVEN_UP[name]
        return (f"NCCL has given up {name}, and does not read it", f"set {instead}" if instead else f"remove {name}")
    meant = _meant(name)
    if meant is None or meant in around.times_named or not _is_given(script, assignment):
        return None
    return f"neither NCCL nor torch reads {name}; did you mean {meant}?", f"set {meant}"


@lru_cache(maxsize=256)
def _meant(name: str) -> str | None:
    """The name that is like it; torch's have a prefix of their own, NCCL's have none."""
    other = name.removeprefix("TORCH_") if name.startswith("TORCH_") else f"TORCH_{name}"
    if other in NCCL | TORCH:
        return other
    near = difflib.get_close_matches(name, NCCL | TORCH, n=1, cutoff=NEAR)
    return near[0] if near and abs(len(near[0]) - len(name)) <= FARTHEST else None


def _is_given(script: Script, assignment: Assignment) -> bool:
    return assignment.is_exported or assignment.name in script.exported


def _not_exported(script: Script, assignment: Assignment, around: _ScriptFacts) -> tuple[str, str] | None:
    """A line of its own; whoever names the variable again may hand it on in a way that we do not know."""
    name = assignment.name
    if _is_given(script, assignment) or assignment.command.words[0].plain in {"local", "readonly", "declare"}:
        return None
    if around.times_named[name] != 1 or around.last_start < assignment.start or around.exports_all:
        return None
    return (
        f"{name} is set in the shell but not exported: what is started below does not see it",
        f"write export {script.written(assignment)}",
    )


def _too_late(assignment: Assignment, around: _ScriptFacts) -> tuple[str, str] | None:
    if assignment.is_for_command or assignment.command.is_conditional or not around.started:
        return None
    if max(around.last_start, around.last_reader) > assignment.start:
        return None
    return (
        f"{assignment.name} is set after {around.started} was started, which does not see it any more",
        f"set {assignment.name} above the line that starts {around.started}",
    )


def _matches_nothing(script: Script, assignment: Assignment) -> tuple[str, str] | None:
    """Interfaces are named by the beginning of their name."""
    value = script.constant(assignment.value)
    if assignment.name != "NCCL_SOCKET_IFNAME" or not value:
        return None
    if ADDRESS.fullmatch(value):
        what = "is an address, and NCCL looks for the name of an interface"
    elif "*" in value:
        what = "has a star, which NCCL takes for a letter: names are matched by how they begin"
    else:
        return None
    return (
        f"NCCL_SOCKET_IFNAME={value} {what}; {_outcome(value)}",
        "write how the name begins, such as eth, or =eth0 for one",
    )


def _outcome(interfaces: str) -> str:
    if interfaces.startswith("^"):
        return "it leaves out none"
    return "that matches none" if "," in interfaces else "it finds none, and fails"


def _is_no_number(script: Script, assignment: Assignment) -> tuple[str, str] | None:
    value = (script.constant(assignment.value) or "").lower()
    if assignment.name not in SWITCHES or value not in {"true", "yes", "on", "y", "t"}:
        return None
    return (
        f"NCCL reads a number from {assignment.name}, and takes {value} for 0: nothing is switched off",
        f"set it to 1, or remove {assignment.name}",
    )


def _filters_nothing(assignment: Assignment, around: _ScriptFacts) -> tuple[str, str] | None:
    level = around.debug_level
    if assignment.name != "NCCL_DEBUG_SUBSYS" or not level or level in TALKING:
        return None
    return (
        f"NCCL_DEBUG_SUBSYS chooses from what NCCL_DEBUG=INFO writes, and NCCL_DEBUG is {level}",
        "set NCCL_DEBUG=INFO, or remove NCCL_DEBUG_SUBSYS",
    )
