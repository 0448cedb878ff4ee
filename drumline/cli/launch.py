"""`drumline launch [where] TASK|SCRIPT.py [args]`: starts a job's ranks here or on other hosts, or shows how to.

Here the command is taken apart and handed to the module of its place: launch_here, launch_hosts,
launch_slurm, launch_kubernetes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from drumline.cli.launch_flags import OWN_FLAGS, wrong_flags, wrong_target
from drumline.cli.launch_here import run_here
from drumline.cli.launch_hosts import launch_on_hosts
from drumline.cli.launch_kubernetes import write_manifest
from drumline.cli.launch_slurm import run_as_node, submit_to_slurm
from drumline.config import read_flags
from drumline.config.values import SWITCH_WORDS
from drumline.errors import ConfigError, ExitCode

USAGE = """\
usage: drumline launch [flags] TASK|SCRIPT.py [arguments]

Starts any script that torchrun could start, or `drumline train TASK`, on several ranks of this machine, on other hosts
over ssh, or on this machine as one node of a job; or shows how to. What stands behind the script's or task's name
belongs to it.
"""
EXIT_CODES = """\
exit codes: 0 success, 2 wrong usage, 3 a host could not take part or the nodes did not meet, 75 told to leave by a
            signal, and saved, 130 interrupted; otherwise that of the rank that failed first (1 when a signal ended
            it, or its host was lost)
"""


def run(argv: Sequence[str]) -> int:
    """The verb. Everything that can be wrong with the command is said before torch is imported."""
    own, target, arguments = split_command(argv)
    flags = read_flags(own, own={name: kind for name, (kind, *_) in OWN_FLAGS.items()})
    if flags.own.get("help"):
        print(_help(), end="")
        return ExitCode.SUCCESS
    if problems := [*wrong_flags(flags), *wrong_target(flags, target)]:
        raise ConfigError(problems, next_step="`drumline launch --help` says what it takes")
    assert target is not None
    if flags.own.get("kubernetes"):
        return write_manifest(flags, target, arguments)
    if flags.own.get("slurm"):
        return submit_to_slurm(flags, target, arguments)
    if flags.own.get("srun"):
        return run_as_node(flags, target, arguments)
    if "hosts" in flags.own or "hostfile" in flags.own:
        return launch_on_hosts(flags, target, arguments)
    return run_here(flags, target, arguments)


def split_command(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """The verb's own flags, the task or script, and what belongs to that, untouched."""
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] != "--":
        flag, equals, _ = argv[position].partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else "-"
        is_switch = OWN_FLAGS.get(flag.removeprefix("--"), (str,))[0] is bool or flag in ("-h", "--help")
        takes_next = following.lower() in SWITCH_WORDS if is_switch else not following.startswith("-")
        position += 2 if takes_next and not equals else 1
    own = list(argv[:position])
    rest = list(argv[position + 1 :] if argv[position : position + 1] == ["--"] else argv[position:])
    return own, rest[0] if rest else None, rest[1:]


def _help() -> str:
    from drumline.config.help import render_entry

    width = shutil.get_terminal_size().columns
    entries = [
        render_entry(f"--{name}", takes, doc, width=width) for name, (_, takes, doc) in OWN_FLAGS.items()
    ]
    return "\n".join([USAGE, *entries, "", EXIT_CODES])
