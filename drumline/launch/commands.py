"""What a user does next: commands to copy from our output, and what the same command would do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def resume_command(arguments: Sequence[str], *, procs: int) -> str:
    """The command that resumes this run, on as many ranks: the same one without `--fresh`, and with `--procs` where a
    launcher had it."""
    rest = [word for word in arguments if word != "--fresh"]
    has_procs = any(word.partition("=")[0] == "--procs" for word in rest)
    return shlex.join(
        ["drumline", "train", *rest, *([] if has_procs or procs == 1 else ["--procs", str(procs)])]
    )


def interrupted(run: Path | None, arguments: Sequence[str]) -> str:
    """The last line after Ctrl-C. `run`: the run folder, where it is known here; `arguments` of `drumline train`."""
    again = "rerun the same command without --fresh" if "--fresh" in arguments else "rerun the same command"
    if run is None:
        return f"interrupted; {again} to resume from the newest checkpoint, if one was saved"
    if any((run / "checkpoints").glob("step-*")):
        return f"interrupted; {again} to resume from the newest checkpoint"
    return "interrupted before the first save; rerun the same command to start from the beginning"


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
