"""`drumline lint PATH...`: the command of the separate distribution `drumline-lint`."""

from __future__ import annotations

from collections.abc import Sequence

from drumline_lint import command


def run(argv: Sequence[str]) -> int:
    return command.run(argv, prog="drumline lint")
