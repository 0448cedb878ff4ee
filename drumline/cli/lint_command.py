"""`drumline lint PATH...`: the command of the separate distribution `drumline-lint`."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.base.errors import UsageError

FROM_GIT = "git+https://github.com/OWNER/drumline#subdirectory=packages/drumline-lint"


def run(argv: Sequence[str]) -> int:
    """Pass the arguments on, if the linter is installed."""
    try:
        from drumline_lint import command
    except ModuleNotFoundError as error:
        raise UsageError(
            "the linter is a package of its own, drumline-lint, and is not installed",
            next_step=f"pip install ./packages/drumline-lint in a checkout, or pip install {FROM_GIT!r}",
        ) from error
    return command.run(argv, prog="drumline lint")
