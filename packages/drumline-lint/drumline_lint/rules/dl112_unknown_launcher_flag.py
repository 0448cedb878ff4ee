"""DL112: a flag that the launcher does not have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import (
    ACCELERATE,
    DEEPSPEED,
    FLAG_TABLES,
    TORCHRUN,
    Launch,
    launches,
)
from drumline_lint.reading.shell import Assignment, Script
from drumline_lint.reading.shell_parser import Kind, Word
from drumline_lint.reading.slurm import LONG_OPTIONS, header_lines

RULE = rule("DL112")
# What the launchers call the same thing, and further names that people take for it.
_MEANINGS: Sequence[tuple[Mapping[str, str], str]] = (
    (
        {TORCHRUN: "nnodes", ACCELERATE: "num-machines", DEEPSPEED: "num-nodes"},
        "nnodes num-machines num-nodes nodes",
    ),
    (
        {TORCHRUN: "nproc-per-node", ACCELERATE: "num-processes", DEEPSPEED: "num-gpus"},
        "nproc-per-node nproc num-processes num-gpus gpus gpus-per-node nprocs-per-node ntasks-per-node",
    ),
    ({TORCHRUN: "node-rank", ACCELERATE: "machine-rank"}, "node-rank machine-rank"),
    (
        {TORCHRUN: "master-addr", ACCELERATE: "main-process-ip"},
        "master-addr main-process-ip master-address",
    ),
    ({TORCHRUN: "master-port", ACCELERATE: "main-process-port"}, "master-port main-process-port"),
)
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_PROCESSES = ("gpu", "auto", "cpu", "xpu")
_PORTS = ("master-port", "main-process-port")
_NUMBERS = {*_PORTS, "nnodes", "nproc-per-node", "node-rank", "num-machines", "num-processes"}
_LAST_PORT = 65535
_JOB_NUMBER = re.compile(
    r"(?:\$\(\([ ]*(?:\d+ *\+ *)?)?\$?\{?SLURM_JOB_?ID\}?(?: *\+ *\d+)?(?: *\)\))?"
)


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        yield from _blanks_at_equals(script, launch)
        if launch.unknown_flag is not None:
            yield from _unknown_flag(script, launch, launch.unknown_flag)
        yield from _no_number(script, launch)
        if launch.is_torchrun:
            yield from _unknown_value(script, launch, "rdzv-backend", _BACKENDS)
            yield from _unknown_value(script, launch, "nproc-per-node", _PROCESSES)
        if launch.srun is not None and launch.srun_word is not None:
            for name in launch.srun.by_name:
                if meant := _meant_option(name):
                    message = f"srun has no option --{name}"
                    yield RULE.at(script, launch.srun_word, message, fix=f"write --{meant}")
    yield from _refused_port(script)
    yield from _header(script)


def _unknown_flag(script: Script, launch: Launch, word: Word) -> Iterator[Finding]:
    written = word.head.partition("=")[0]
    name = written.lstrip("-").replace("_", "-")
    table = FLAG_TABLES[launch.kind]
    meant = _same_of(launch, name) or _closest(name, table.names)
    if meant:
        separator = "_" if "_" in written else "-"
        fix = f"write --{meant.replace('-', separator)}"
        yield RULE.at(script, word, f"{launch.kind} has no flag {written}", fix=fix)


def _same_of(launch: Launch, name: str) -> str:
    """This launcher's flag for what is a flag of another one."""
    kind = TORCHRUN if launch.is_torchrun else launch.kind
    flags = (flags.get(kind, "") for flags, names in _MEANINGS if name in names.split())
    return next(flags, "")


def _blanks_at_equals(script: Script, launch: Launch) -> Iterator[Finding]:
    for name, flag in launch.flags.items():
        if flag.value is not None and flag.value.plain == "=":
            message = f"{launch.kind} takes `=` as the value of --{name}"
            yield RULE.at(script, flag.word, message, fix="write no blanks around `=`")


def _no_number(script: Script, launch: Launch) -> Iterator[Finding]:
    """`--master-port train.py`, `--num_processes 2*8`."""
    for name in _NUMBERS & launch.flags.keys():
        flag = launch.flags[name]
        value = launch.value(name) or ""
        if value.endswith(".py") or value.startswith("-"):
            message = f"--{name} takes a number, and {value} comes after it"
            yield RULE.at(script, flag.word, message)
        elif flag.value is not None and (product := _product(launch.script, flag.value)):
            message = f"--{name} takes a number, and a shell does not calculate {product}"
            yield RULE.at(script, flag.word, message, fix="write $((...))")


def _product(script: Script, word: Word, depth: int = 0) -> str:
    """`$NODES*8`, also as the value of a variable."""
    written = script.text[word.start : word.end].strip("\"'")
    if any(piece.kind is Kind.TEXT and "*" in piece.text for piece in word.pieces):
        return written
    names = [piece.text for piece in word.pieces if piece.kind is Kind.VARIABLE]
    assigned = script.variables.get(names[0], []) if len(names) == 1 else []
    return _product(script, assigned[0].value, depth + 1) if len(assigned) == 1 > depth else ""


def _refused_port(script: Script) -> Iterator[Finding]:
    """Ports end at 65535, and Slurm's numbers of jobs do not."""
    ports = [launch.flags.get(name) for launch in launches(script) for name in _PORTS]
    words = [flag.value for flag in ports if flag is not None and flag.value is not None]
    words += [
        assignment.value for assignment in script.assignments if assignment.name == "MASTER_PORT"
    ]
    for place in {script.source_of(word).start: script.source_of(word) for word in words}.values():
        value = place.value if isinstance(place, Assignment) else place
        port = script.constant(value) or ""
        if port.isdigit() and int(port) > _LAST_PORT:
            yield RULE.at(script, place, f"{port} is no port: they end at {_LAST_PORT}")
        elif _JOB_NUMBER.fullmatch("".join(piece.text for piece in value.pieces)):
            message = f"the numbers of jobs exceed {_LAST_PORT}, where ports end"
            yield RULE.at(script, place, message, fix="write $((20000 + SLURM_JOB_ID % 20000))")


def _unknown_value(
    script: Script, launch: Launch, name: str, values: Collection[str]
) -> Iterator[Finding]:
    value = launch.value(name)
    if value is None or value in values or value.isdigit() or not value:
        return
    if meant := difflib.get_close_matches(value.lower(), values, 1, 0.6):
        message = f"torchrun refuses --{name} {value}"
        yield RULE.at(script, launch.flags[name].word, message, fix=f"write {meant[0]}")


def _header(script: Script) -> Iterator[Finding]:
    if "#SBATCH" not in script.text or script.container:
        return
    for line in header_lines(script.text):
        meant = "" if line.is_late else _meant_option(line.option)
        if meant:
            message = f"sbatch has no option --{line.option}"
            yield RULE.at(script, Word(line.start, line.end, ()), message, fix=f"write --{meant}")


def _meant_option(name: str) -> str:
    """Plugins of Slurm add options, and an option may be abbreviated."""
    is_abbreviated = any(option.startswith(name) for option in LONG_OPTIONS)
    is_of_pyxis = name.startswith("container")
    is_old_name = name in {"cpu_bind", "mem_bind"}
    if is_abbreviated or is_of_pyxis or is_old_name:
        return ""
    return _closest(name, LONG_OPTIONS)


def _closest(name: str, names: Collection[str]) -> str:
    meant = next(iter(difflib.get_close_matches(name, names, 1, 0.8)), "")
    # A longer name is a flag of another version rather than a slip.
    return "" if name.startswith(f"{meant}-") else meant
