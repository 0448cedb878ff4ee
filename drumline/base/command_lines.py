"""Commands for the user to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def resume_command(arguments: Sequence[str], *, procs: int) -> str:
    """The command that resumes this run on the same number of ranks: without `--fresh`, with
    `--procs` if needed."""
    rest = [word for word in arguments if word != "--fresh"]
    has_procs = any(word.partition("=")[0] == "--procs" for word in rest)
    return shlex.join(
        ["drumline", "train", *rest, *([] if has_procs or procs == 1 else ["--procs", str(procs)])]
    )


def two_node_command(task: str, arguments: Sequence[str], *, procs: int) -> str:
    """The command for the same run on two machines, with this many ranks on each."""
    rest: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        if (
            before != "--procs"
            and word not in ("--procs", "--fresh")
            and not word.startswith("--procs=")
        ):
            rest.append(word)
    # `drumline launch` needs the task before its flags; `drumline train` takes it anywhere. A
    # flag's value is not it.
    is_value = [before.startswith("--") and "=" not in before for before in ["", *rest]]
    places = sorted((is_value[place], place) for place, word in enumerate(rest) if word == task)
    if places:
        del rest[places[0][1]]
    return f"drumline launch --hosts HOST_A,HOST_B --procs {procs} {shlex.join([task, *rest])}"
