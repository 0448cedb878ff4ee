"""With `drumline launch --keep-going`: how long to wait before the next start."""

from __future__ import annotations

LONG_RUN_S = 60.0
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0


def next_pause_s(pause_s: float, ran_s: float) -> float:
    """The pause after a start that ran for `ran_s` and began after a pause of `pause_s`: a notice
    that is still there preempts each start soon."""
    if ran_s > LONG_RUN_S:
        return 0.0
    return min(MAX_PAUSE_S, 2 * pause_s + FIRST_PAUSE_S)
