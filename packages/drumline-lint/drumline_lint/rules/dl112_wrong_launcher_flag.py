"""DL112: a flag that the launcher does not have, or does not get."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import (
    ACCELERATE,
    DEEPSPEED,
    FLAG_TABLES,
    OLD_LAUNCH,
    TORCHRUN,
    Launch,
    launches,
)
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL112")

# What the launchers call the same thing, and further names that people take for it.
_NAMES = (
    ("nnodes", "num-machines", "num-nodes", "nodes"),
    ("nproc-per-node", "num-processes", "num-gpus", "nproc", "gpus", "gpus-per-node"),
    ("node-rank", "machine-rank"),
    ("master-addr", "main-process-ip", "master-address"),
    ("master-port", "main-process-port"),
)
# Training scripts have --master-addr, --master-port and --node-rank of their own.
_OF_TORCHRUN = {"nproc-per-node", "nnodes", "rdzv-backend", "rdzv-endpoint", "standalone"}
_ONLY_LAUNCHERS = {
    TORCHRUN: _OF_TORCHRUN,
    OLD_LAUNCH: _OF_TORCHRUN,
    ACCELERATE: {"num-processes", "num-machines", "machine-rank", "main-process-ip", "multi-gpu"},
    DEEPSPEED: {"num-gpus", "num-nodes", "hostfile"},
}


def check_shell(script: Script) -> Iterator[Finding]:
    """Flags of another launcher, or with a slip, and flags behind the training script.

    For example:

        torchrun --num-nodes=2 train.py
        torchrun train.py --nproc-per-node=4
    """
    for launch in launches(script):
        if launch.unknown_flag is not None:
            yield from _unknown_flag(script, launch, launch.unknown_flag)
        if launch.is_sure:
            yield from _after_script(script, launch)


def _unknown_flag(script: Script, launch: Launch, word: Word) -> Iterator[Finding]:
    """A flag that the launcher does not have, and one that is meant by it.

    For example:

        torchrun --num-nodes=2 train.py
    """
    written = word.head.partition("=")[0]
    name = written.lstrip("-").replace("_", "-")
    flag_names = FLAG_TABLES[launch.kind].names

    synonyms = [flag for names in _NAMES if name in names for flag in names if flag in flag_names]
    similar = difflib.get_close_matches(name, flag_names, 1, 0.8)
    meant = next(iter([*synonyms, *similar]), "")

    # A longer name is a flag of another version rather than a slip.
    if meant and not name.startswith(f"{meant}-"):
        fix = f"write --{meant.replace('-', '_' if '_' in written else '-')}"
        yield RULE.at(script, word, f"{launch.kind} has no flag {written}", fix=fix)


def _after_script(script: Script, launch: Launch) -> Iterator[Finding]:
    """A flag of the launcher that the training script gets.

    For example:

        torchrun train.py --nproc-per-node=4
    """
    for word in launch.arguments[1:]:
        written = word.head.partition("=")[0]
        name = written.removeprefix("--").replace("_", "-")
        if not written.startswith("--") or name in launch.flags:
            continue
        if name not in _ONLY_LAUNCHERS.get(launch.kind, ()):
            continue

        training = launch.arguments[0].plain or "the training script"
        message = (
            f"{written} comes after {training}, so {training} gets it and {launch.kind} does not"
        )
        fix = "write the flags of the launcher before the training script"
        # Without the flag, deepspeed starts a rank on every GPU.
        severity = Severity.WARNING if launch.kind == DEEPSPEED else None
        yield RULE.at(script, word, message, fix=fix, severity=severity)
