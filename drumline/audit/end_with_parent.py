"""Runs a command that gets a SIGTERM when its parent dies, even if that is killed with -9. Linux only.

This file is run as a program in between: it asks the kernel for that signal, and becomes the command. torchrun's agent
ends its ranks on a SIGTERM; a rank alone ends at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command that does the same and does not outlive this process."""
    if sys.platform != "linux":
        return list(command)
    # Without site-packages and the user's own paths: it starts in milliseconds.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(parent: str, *command: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it has died in between
        sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)  # noqa: S606 - the same command, without a shell


if __name__ == "__main__":
    main(*sys.argv[1:])
