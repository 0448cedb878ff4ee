"""What a rank can be doing."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The numbers are in files that another process reads; new ones go to the end."""

    START = 0
    """Before the first step: the job is built, restored, warmed up."""
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    """Gradients are reduced here: a rank that waits for another one most often waits here."""
    OPTIMIZER = 4
    BETWEEN = 5
    """Between steps: a log line, the comparison of replicas."""
    EVALUATION = 6
    SAVE = 7
    USER = 8
    """In a loop that is the user's own, all that is not data."""
    LEFT = 9
    """Out of the loop and of the process group: nothing is left to observe."""
    FAILED = 10
    """An error is on its way to the user; the record has it in a line."""
    LEAVING = 11
    """Out of the loop: done, preempted, or too early. Workers, files and the process group are being closed."""


# As plain numbers, for the hot path: to look one up in an enum, and to count with it, takes a fifth of a mark's time.
DATA, FORWARD, BACKWARD, OPTIMIZER = (
    int(phase) for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)
