"""Commands for the user to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def resume_command(arguments: Sequence[str], *, procs: int) -> str:
    """The command that resumes this run on the same number of ranks: without `--fresh`, with
    `--procs` if needed."""
    command = ["drumline", "train", *(word for word in arguments if word != "--fresh")]
    has_procs = any(word.partition("=")[0] == "--procs" for word in command)
    if procs != 1 and not has_procs:
        command += ["--procs", str(procs)]
    return shlex.join(command)


def two_node_command(task: str, arguments: Sequence[str], *, procs: int) -> str:
    """The command for the same run on two machines, with this many ranks on each."""
    words = _without_procs_and_fresh(arguments)
    # `drumline launch` needs the task before its flags; `drumline train` takes it anywhere.
    positions = [position for position, word in enumerate(words) if word == task]
    if positions:
        del words[min(positions, key=lambda position: _is_flag_value(words, position))]
    return f"drumline launch --hosts HOST_A,HOST_B --procs {procs} {shlex.join([task, *words])}"


def _without_procs_and_fresh(arguments: Sequence[str]) -> list[str]:
    words: list[str] = []
    previous = ""
    for word in arguments:
        is_procs = word == "--procs" or word.startswith("--procs=") or previous == "--procs"
        if not is_procs and word != "--fresh":
            words.append(word)
        previous = word
    return words


def _is_flag_value(words: Sequence[str], position: int) -> bool:
    """Whether this word may be the value of the flag before it, and so not the task."""
    previous = words[position - 1] if position else ""
    return previous.startswith("--") and "=" not in previous
