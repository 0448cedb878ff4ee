"""Runs a command that gets a SIGTERM when its parent dies, even if that is killed with -9. Linux only.

This file is run as a program in between: it asks the kernel for that signal, and becomes the command. torchrun's agent
ends its ranks on a SIGTERM; a rank alone ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command that does the same and does not outlive this process."""
    if sys.platform != "linux":
        return list(command)
    # Without site-packages and the user's own paths: it starts in milliseconds.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: str, *command: str) -> None:
    sys.path.append(str(Path(__file__).parents[2]))  # this process has no path to the package
    from drumline.processes import end_with_parent

    if not end_with_parent(int(parent)):
        sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)  # noqa: S606 - the same command, without a shell


if __name__ == "__main__":
    main(*sys.argv[1:])
