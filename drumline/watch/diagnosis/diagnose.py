"""What is wrong with the run? Evidence in, a diagnosis out, and nothing else.

The order of the checks matters. The cause is to be named, not the ranks that wait for it or fail because of it: so a
rank that ended by itself comes before those that lost a connection, and what cannot run before what may only be slow.
"""

from __future__ import annotations

from collections.abc import Callable

from drumline.watch.cluster_state import ClusterState
from drumline.watch.diagnosis.blocked import find_blocked, find_debugged, find_stopped, find_unknown
from drumline.watch.diagnosis.diagnosis import Diagnosis
from drumline.watch.diagnosis.evidence import Evidence
from drumline.watch.diagnosis.exited import find_exited, find_lost_connection
from drumline.watch.diagnosis.left_loop import find_left_early, find_teardown
from drumline.watch.diagnosis.mismatch import find_mismatch
from drumline.watch.diagnosis.unreachable import find_late_node, find_never_seen, find_unreachable

_CHECKS: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    find_exited,
    find_stopped,
    find_unreachable,
    find_left_early,
    find_mismatch,
    find_never_seen,
    find_lost_connection,
    find_debugged,
    find_late_node,
    find_teardown,
    find_blocked,
    find_unknown,
)


def diagnose(cluster: ClusterState) -> Diagnosis | None:
    """The likeliest cause; None: nothing is known of any rank."""
    evidence = Evidence(cluster)
    return next((found for check in _CHECKS if (found := check(evidence)) is not None), None)
