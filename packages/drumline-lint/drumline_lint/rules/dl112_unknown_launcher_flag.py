"""DL112: a flag that the launcher does not have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import FLAG_TABLES, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.slurm import LONG_OPTIONS, header_lines

RULE = rule("DL112")
# The flags of other launchers; torchrun has its own for the same.
_FOREIGN = {
    "nodes": "nnodes",
    "num-nodes": "nnodes",
    "num-machines": "nnodes",
    "gpus": "nproc-per-node",
    "num-gpus": "nproc-per-node",
    "gpus-per-node": "nproc-per-node",
    "num-processes": "nproc-per-node",
    "nprocs-per-node": "nproc-per-node",
    "ntasks-per-node": "nproc-per-node",
    "machine-rank": "node-rank",
    "main-process-ip": "master-addr",
    "main-process-port": "master-port",
}
_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_PROCESSES = ("gpu", "auto", "cpu", "xpu")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        yield from _blanks_at_equals(script, launch)
        if launch.unknown_flag is not None:
            yield from _unknown_flag(script, launch, launch.unknown_flag)
        if launch.is_torchrun:
            yield from _unknown_value(script, launch, "rdzv-backend", _BACKENDS)
            yield from _unknown_value(script, launch, "nproc-per-node", _PROCESSES)
        if launch.srun is not None and launch.srun_word is not None:
            for name in launch.srun.by_name:
                if meant := _meant_option(name):
                    message = f"srun has no option --{name}"
                    yield RULE.at(script, launch.srun_word, message, fix=f"write --{meant}")
    yield from _header(script)


def _unknown_flag(script: Script, launch: Launch, word: Word) -> Iterator[Finding]:
    written = word.head.partition("=")[0]
    name = written.lstrip("-").replace("_", "-")
    table = FLAG_TABLES[launch.kind]
    meant = _closest(name, table.names) or (launch.is_torchrun and _FOREIGN.get(name)) or ""
    if meant:
        separator = "_" if "_" in written else "-"
        fix = f"write --{meant.replace('-', separator)}"
        yield RULE.at(script, word, f"{launch.kind} has no flag {written}", fix=fix)


def _blanks_at_equals(script: Script, launch: Launch) -> Iterator[Finding]:
    for name, flag in launch.flags.items():
        if flag.value is not None and flag.value.plain == "=":
            message = f"{launch.kind} takes `=` as the value of --{name}"
            yield RULE.at(script, flag.word, message, fix="write no blanks around `=`")


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
    if is_abbreviated or is_of_pyxis:
        return ""
    return _closest(name, LONG_OPTIONS)


def _closest(name: str, names: Collection[str]) -> str:
    meant = next(iter(difflib.get_close_matches(name, names, 1, 0.8)), "")
    # A longer name is a flag of another version rather than a slip.
    return "" if name.startswith(f"{meant}-") else meant
