"""`drumline lint PATH...`: the command `drumline-lint`, which is a distribution of its own."""

from __future__ import annotations

from collections.abc import Sequence

from drumline_lint import command


def run(argv: Sequence[str]) -> int:
    return command.run(argv, prog="drumline lint")
