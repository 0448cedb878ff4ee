"""Commands that a user can copy from our output."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def resume_command(arguments: Sequence[str]) -> str:
    """The command that goes on with this run: the same one, less the wish for a new start."""
    return shlex.join(["drumline", "train", *(word for word in arguments if word != "--fresh")])


def two_node_command(task: str, arguments: Sequence[str], *, procs: int) -> str:
    """The same run on two machines, as many ranks on each."""
    rest = _without_procs([word for word in arguments if word != "--fresh"])
    # For a launch what belongs to the task stands behind its name; `drumline train` takes it in any order.
    behind_a_flag = [before.startswith("--") and "=" not in before for before in ["", *rest]]
    places = sorted((behind_a_flag[place], place) for place, word in enumerate(rest) if word == task)
    if places:
        del rest[places[0][1]]
    return f"drumline launch --hosts HOST_A,HOST_B --procs {procs} {shlex.join([task, *rest])}"


def _without_procs(words: Sequence[str]) -> list[str]:
    """The launcher says how many ranks there are."""
    kept = []
    skip_next = False
    for word in words:
        if not skip_next and word != "--procs" and not word.startswith("--procs="):
            kept.append(word)
        skip_next = word == "--procs"
    return kept
