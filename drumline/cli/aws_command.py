"""`drumline aws plan | up | status | launch | down`: flags and wiring; the work is in
launch/aws/."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.base.errors import ExitCode, UsageError, did_you_mean
from drumline.base.terminal import print_message, show, show_lines
from drumline.base.text import plural
from drumline.cli.command_line import HELP_FLAG, read_command
from drumline.cli.doctor_command import show_step
from drumline.config import FlagTable
from drumline.launch.aws.account import Account
from drumline.launch.aws.cluster_creation import bring_up
from drumline.launch.aws.cluster_nodes import nodes_of, status_lines
from drumline.launch.aws.cluster_plan import make_plan
from drumline.launch.aws.cluster_settings import (
    CLUSTER,
    ENDS,
    REACH,
    WHERE,
    ClusterSettings,
    account_and_settings,
)
from drumline.launch.aws.teardown import kept_lines, made_by_others, take_down

MADE: Mapping[str, FlagTable] = {
    "where": {**WHERE, **HELP_FLAG},
    "the cluster": CLUSTER,
    "how it is reached, and what exists already": REACH,
    "when it ends  Also when this machine is off.": ENDS,
}
FOUND: Mapping[str, FlagTable] = {"where": {**WHERE, **HELP_FLAG}}
DELETE: FlagTable = {
    "delete-data": (bool, "", "Delete the volume with its data too [it is kept]."),
    "any-owner": (
        bool,
        "",
        "Remove it also if another identity made it [asked on a terminal, otherwise refused].",
    ),
}
GROUPS: Mapping[str, Mapping[str, FlagTable]] = {
    "plan": MADE,
    "up": MADE,
    "status": FOUND,
    "down": {**FOUND, "what is removed": DELETE},
}
LINES = {
    "plan": "drumline aws plan --type TYPE --nodes N ...   check quota, price and settings; nothing is touched",
    "up": "drumline aws up --type TYPE --nodes N ...     make the cluster: one CloudFormation stack",
    "status": "drumline aws status                           the clusters of the region, and what they cost so far",
    "launch": "drumline aws launch TASK|SCRIPT.py ...        check all pairs of nodes, then launch on them over ssh",
    "down": "drumline aws down                             remove it, and prove that nothing billable is left",
}
ABOUT = """\

Credentials come from boto3's own chain (aws configure, aws sso login); they are never shown.
`drumline aws up --help`, and so on, list the flags.
"""
EXIT_CODES = (
    "exit codes: 0 success, 2 wrong usage, 3 AWS refused something, 130 interrupted; "
    "launch: those of drumline launch\n"
)


def run(argv: Sequence[str]) -> int:
    verb, *arguments = argv or ["--help"]
    if verb in ("-h", "--help"):
        show("usage: " + "\n       ".join(LINES.values()) + "\n" + ABOUT, end="")
        return ExitCode.SUCCESS if argv else ExitCode.USAGE
    if verb == "launch":
        from drumline.cli.aws_launch import launch

        return launch(arguments)
    if verb not in GROUPS:
        what = f"there is no `drumline aws {verb}`; {did_you_mean(verb, [*GROUPS, 'launch'])}"
        raise UsageError(what, next_step="read drumline aws --help")
    flags = read_command(
        f"aws {verb}",
        arguments,
        GROUPS[verb],
        f"usage: {LINES[verb]}\n",
        ends_with=EXIT_CODES,
        max_positional=0,
    )
    account, settings = account_and_settings(flags.values, [], verb)
    if verb == "plan":
        lines = make_plan(account, settings).lines()
        show_lines([*lines, "nothing was touched; `drumline aws up` makes it"])
    elif verb == "status":
        show_lines(status_lines(account))
    elif verb == "up":
        _up(account, settings)
    else:
        _down(account, settings, flags.values)
    return ExitCode.SUCCESS


def _up(account: Account, settings: ClusterSettings) -> None:
    plan = make_plan(account, settings)
    show_lines(plan.lines())
    try:
        bring_up(account, plan, show_step)
    except KeyboardInterrupt:
        name = settings.name
        next_steps = (f"follow it: the same command; remove it: drumline aws down --name {name}",)
        print_message(f"interrupted: AWS continues to make {name}, and it costs money", *next_steps)
        raise
    show_step("")
    nodes = nodes_of(account, settings.name)
    show_lines(
        [
            f"{settings.name} is up: {plural(len(nodes), 'node')} at {', '.join(node.address for node in nodes)}",
            f"train:   drumline aws launch --name {settings.name} TASK|SCRIPT.py",
            f"the end: drumline aws down --name {settings.name}",
        ]
    )


def _down(account: Account, settings: ClusterSettings, flags: Mapping[str, Any]) -> None:
    delete_data = bool(flags.get("delete-data"))
    other_owners = made_by_others(account, settings, delete_data=delete_data)
    if other_owners and not flags.get("any-owner"):
        _ask_to_remove(other_owners, settings.name)
    volumes = take_down(account, settings, show_step, delete_data=delete_data)
    show_step("")
    show_lines(kept_lines(account, settings, volumes))


def _ask_to_remove(other_owners: Sequence[str], name: str) -> None:
    """On a terminal; without one nobody can answer, so a flag has to."""
    what = "; ".join(other_owners)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        again = f"ask whoever made it; to remove it all the same: drumline aws down --name {name} --any-owner"
        raise UsageError(f"{what}; nothing was removed", next_step=again)
    print_message(what, f"remove it all the same? type its name ({name}) to do so:")
    if sys.stdin.readline().strip() != name:
        raise UsageError(f"{name} was left alone: {what}", next_step="ask whoever made it")
