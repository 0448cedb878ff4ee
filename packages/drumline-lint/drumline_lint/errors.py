"""Errors of the command line and of the settings, and its exit codes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of `drumline-lint`."""

    CLEAN = 0
    FINDINGS = 1
    USAGE = 2
    INTERRUPTED = 130


class UsageError(Exception):
    """The command or its settings are wrong: what is wrong, more lines about it, and what to do
    next."""

    def __init__(self, what: str, *lines: str, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.more = [*lines, *([f"try: {next_step}"] if next_step else [])]

    def __str__(self) -> str:
        return "\n  ".join([self.what, *self.more])


class ConfigError(UsageError):
    """One or more settings are wrong; all of them are listed."""

    def __init__(self, problems: Iterable[str], *, next_step: str) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = f"{count} problem{'s' if count != 1 else ''} in the configuration:"
        super().__init__(
            heading, *(f"- {problem}" for problem in self.problems), next_step=next_step
        )


def did_you_mean(word: str, choices: Iterable[str], *, known_as: str = "known") -> str:
    """The end of a message about an unknown name: the nearest known one, otherwise all of them."""
    names = sorted(choices)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {nearest[0]!r}?" if nearest else f"{known_as}: {', '.join(names)}"
