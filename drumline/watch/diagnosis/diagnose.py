"""What holds up the run? Facts in, a diagnosis out, and nothing else.

The order is that of suspicion. The cause is to be named, not those who wait for it, and not those who fell with it: so
what ended by itself comes before what was dragged along, and what cannot run before what may only be slow.
"""

from __future__ import annotations

from collections.abc import Callable

from drumline.watch.cluster_state import ClusterState
from drumline.watch.diagnosis.blocked import judge_standing, judge_unknown
from drumline.watch.diagnosis.diagnosis import Diagnosis
from drumline.watch.diagnosis.evidence import Evidence
from drumline.watch.diagnosis.exited import judge_ended, judge_lost_peers
from drumline.watch.diagnosis.left_loop import judge_left, judge_teardown
from drumline.watch.diagnosis.mismatch import judge_mismatch
from drumline.watch.diagnosis.stopped import judge_debugged, judge_stopped
from drumline.watch.diagnosis.unreachable import judge_late, judge_reach, judge_unheard

_ORDER: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    judge_ended,
    judge_stopped,
    judge_reach,
    judge_left,
    judge_mismatch,
    judge_unheard,
    judge_lost_peers,
    judge_debugged,
    judge_late,
    judge_teardown,
    judge_standing,
    judge_unknown,
)


def diagnose(picture: ClusterState) -> Diagnosis | None:
    """The likeliest cause; None when there is nobody to say anything of."""
    evidence = Evidence(picture)
    return next((diagnosis for look in _ORDER if (diagnosis := look(evidence)) is not None), None)
