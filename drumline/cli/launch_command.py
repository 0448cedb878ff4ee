"""`drumline launch [where] TASK|SCRIPT.py [args]`: starts a job's ranks here or on other hosts, or shows how to.

Here the command is taken apart and handed to the module of its place: launch_here, launch_hosts,
launch_slurm, launch_kubernetes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from drumline.cli.launch_flags import GROUPS, OWN_FLAGS, wrong_flags, wrong_target
from drumline.cli.launch_here import run_here
from drumline.cli.launch_hosts import launch_on_hosts
from drumline.cli.launch_kubernetes import write_manifest
from drumline.cli.launch_slurm import run_as_node, submit_to_slurm
from drumline.config import read_flags
from drumline.config.values import SWITCHES
from drumline.errors import ConfigError, ExitCode
from drumline.terminal import show

USAGE = """\
usage: drumline launch [where] [flags] TASK|SCRIPT.py [arguments]

Starts a task, or any script that torchrun could start, by torchrun's own agent.
Flags of the launch stand before the name; what is behind it belongs to it.

  drumline launch --procs 8 train.py --epochs 3       8 ranks on this machine
  drumline launch --hosts a,b:4 --procs 8 digits      8 on a, 4 on b, over ssh
  drumline launch --watch --procs 8 train.py          a hang is told, by rank
  drumline launch --env-file .env digits              this node of a job
  drumline launch --slurm --nodes 2 --time 8:00:00 digits
  drumline launch --kubernetes --nodes 2 --image me/train:1 digits
  drumline launch --print --hosts a,b digits          what would be run, where

Prove the hosts first: drumline doctor --hosts a,b
"""
EXIT_CODES = """\
exit codes: 0 success, 2 wrong usage, 3 a host could not take part or the nodes
            did not meet, 70 the run hangs and was stopped, 75 told to leave by
            a signal, and saved, 130 interrupted; otherwise that of the rank
            that failed first (1 when a signal ended it, or its host was lost)
"""


def run(argv: Sequence[str]) -> int:
    """The verb. Everything that can be wrong with the command is said before torch is imported."""
    own, target, arguments = split_command(argv)
    flags = read_flags(own, OWN_FLAGS, no_settings="a setting of the task goes after its name")
    if flags.own.get("help"):
        show(_help(), end="")
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
        takes_next = following.lower() in SWITCHES if is_switch else not following.startswith("-")
        position += 2 if takes_next and not equals else 1
    own = list(argv[:position])
    rest = list(argv[position + 1 :] if argv[position : position + 1] == ["--"] else argv[position:])
    return own, rest[0] if rest else None, rest[1:]


def _help() -> str:
    from drumline.config.help import render_flags

    return "\n".join([USAGE, render_flags(GROUPS, width=shutil.get_terminal_size().columns), EXIT_CODES])
