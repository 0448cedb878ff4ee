"""What the command lines of all verbs share: how they are read, their help, and output for
scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.base.errors import ConfigError, UsageError, did_you_mean
from drumline.base.rank_environment import topology_from
from drumline.base.text import show
from drumline.cli import HelpShown
from drumline.config import Flags, FlagTable, read_flags, switch
from drumline.runs.events import as_json

HELP_FLAG: FlagTable = {"help": switch("Show this text.")}
OUTPUT_FLAGS: FlagTable = {"json": switch("Print one JSON object, for scripts."), **HELP_FLAG}


def read_command(
    verb: str,
    argv: Sequence[str],
    groups: Mapping[str, FlagTable],
    usage: str,
    *,
    ends_with: str = "",
    max_positional: int = 1,
    takes_settings: bool = False,
) -> Flags:
    """The command line of a verb. Problems in it are raised, unless the verb takes settings of a
    run: then it checks these too, and raises all problems at once. `ends_with`: of the help."""
    table = {name: flag for group in groups.values() for name, flag in group.items()}
    no_settings = None if takes_settings else f"is a setting of a run; {verb} takes none"
    flags = read_flags(argv, table, max_positional=max_positional, no_settings=no_settings)
    show_help(flags, groups, usage, ends_with)
    if not takes_settings:
        check_command(verb, flags.layer.problems)
    return flags


def show_help(
    flags: Flags, groups: Mapping[str, FlagTable], usage: str, ends_with: str = ""
) -> None:
    """Raises HelpShown, if it was asked for."""
    if not flags.values.help:
        return
    from drumline.config.help import render_flags

    parts = filter(None, [usage, render_flags(groups), ends_with])
    show("\n".join(parts), end="")
    raise HelpShown


def read_subverb(
    verb: str, argv: Sequence[str], subverbs: Iterable[str], overview: str
) -> tuple[str, list[str]]:
    """The first word of a command line, as in `drumline scale predict`, and what follows it."""
    subverb, *arguments = argv or ["--help"]
    if subverb in ("-h", "--help"):
        show(overview, end="")
        raise HelpShown(is_asked_for=bool(argv))
    if subverb not in subverbs:
        raise UsageError(
            f"there is no `drumline {verb} {subverb}`; {did_you_mean(subverb, subverbs)}",
            next_step=f"read drumline {verb} --help",
        )
    return subverb, arguments


def misplaced(flags: Container[str], names: Iterable[str], reason: str) -> Iterator[str]:
    """A problem for each flag of these that is given."""
    return (f"--{name}: {reason}" for name in names if name in flags)


def check_command(verb: str, problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise ConfigError(problems, next_step=f"read drumline {verb} --help")


def check_run_is_named(verb: str, flags: Flags) -> None:
    if not flags.positional:
        raise UsageError(
            "no RUN was given", next_step=f"give a run folder, as in: drumline {verb} runs/digits"
        )


def check_new(flags: Flags, *paths: Path) -> None:
    """Refuse to replace files, unless --force is given."""
    for path in paths:
        if path.exists() and not flags.values.force:
            raise UsageError(
                f"{path} exists already",
                next_step="give --to another name, or --force to replace it",
            )


def check_no_rank(verb: str) -> None:
    """For a verb that is not run by each rank: most start the ranks themselves."""
    if topology_from(os.environ) is not None:
        raise UsageError(
            f"drumline {verb} is run once, but a launcher has started this process as a rank",
            next_step="run it without torchrun or srun",
        )


def show_json(document: Any, *, indent: int | None = None) -> None:
    show(json.dumps(as_json(document), indent=indent), is_data=True)
