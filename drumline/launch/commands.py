"""Commands that a user can copy from our output."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def resume_command(arguments: Sequence[str]) -> str:
    """The command that goes on with this run: the same one, less the wish for a new start."""
    return shlex.join(["drumline", "train", *(word for word in arguments if word != "--fresh")])


def two_node_command(arguments: Sequence[str], *, procs: int) -> str:
    """What to start on each of two nodes."""
    rest = _without_procs([word for word in arguments if word != "--fresh"])
    torchrun = (
        f"torchrun --nnodes 2 --nproc-per-node {procs} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500"
    )
    # The bare dashes keep torchrun's hands off our flags: it takes `--run` for a prefix of its own `--run-path`.
    return f"{torchrun} -m -- drumline train {shlex.join(rest)}"


def _without_procs(words: Sequence[str]) -> list[str]:
    """torchrun says how many ranks there are."""
    kept = []
    skip_next = False
    for word in words:
        if not skip_next and word != "--procs" and not word.startswith("--procs="):
            kept.append(word)
        skip_next = word == "--procs"
    return kept
