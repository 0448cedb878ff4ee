"""DL145: data is copied to the disk of the first node, and all nodes read it there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Command, Kind, Word

RULE = rule("DL145")
_COPIES = {"cp", "rsync", "tar", "unzip", "wget", "curl", "scp", "gsutil", "aws", "rclone"}
_TARGET_OPTION = re.compile(r"-C|-d|-P|-O|-o|--directory")
_LOCAL_PATH = re.compile(r"/(?:tmp|dev/shm|local|localscratch|scratch/local|raid|nvme)(?:/|$)")
_LOCAL_VARIABLES = {"SLURM_TMPDIR", "TMPDIR", "LOCAL_SCRATCH", "LOCALSCRATCH", "JOB_TMPDIR"}


def check_shell(script: Script) -> Iterator[Finding]:
    """Slurm runs a batch script on the first of its nodes."""
    if (script.sbatch.number("nodes") or 1) < 2:
        return
    for command in script.commands:
        target = _target(command)
        folder = _local_folder(script, target) if target is not None else ""
        for launch in launches(script) if folder else ():
            is_later = command.start < launch.command.start
            if is_later and _is_on_several(launch) and _reads(script, launch, folder):
                message = (
                    f"only the first node gets what is copied to {folder}, and every node reads it"
                )
                fix = "copy it on each node: srun --ntasks-per-node=1 ..."
                yield RULE.at(script, command.words[0], message, fix=fix)
                break


def _is_on_several(launch: Launch) -> bool:
    return launch.srun is not None and started_on_nodes(launch) != 1


def _target(command: Command) -> Word | None:
    """The last word, or that after `-C`."""
    if command.words[0].plain not in _COPIES or len(command.words) < 3:
        return None
    for option, word in zip(command.words, command.words[1:], strict=False):
        if _TARGET_OPTION.fullmatch(option.head):
            return word
    return command.words[-1]


def _local_folder(script: Script, word: Word, depth: int = 0) -> str:
    """The beginning of a path on a disk of one node, as it is written; empty for other paths."""
    first = word.pieces[0] if word.pieces else None
    if first is None or depth > 4:
        return ""
    if first.kind is Kind.TEXT:
        return first.text if _LOCAL_PATH.match(first.text) else ""
    if first.kind is Kind.VARIABLE:
        assigned = script.variables.get(first.text, [])
        is_local = first.text in _LOCAL_VARIABLES and not assigned
        if is_local or (len(assigned) == 1 and _local_folder(script, assigned[0].value, depth + 1)):
            return f"${first.text}"
    return ""


def _reads(script: Script, launch: Launch, folder: str) -> bool:
    name = folder.removeprefix("$")
    end = max((word.end for word in launch.arguments), default=launch.name[-1].end)
    written = script.text[launch.command.start : end]
    return re.search(rf"{re.escape(name)}(?:\b|/)", written) is not None
