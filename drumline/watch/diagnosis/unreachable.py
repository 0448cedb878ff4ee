"""Nodes that send no heartbeats, and a node that is itself cut off."""

from __future__ import annotations

from drumline.base.rank_environment import LauncherLink
from drumline.base.text import duration, join_names, named_ranks
from drumline.watch.cluster_state import Answer, ClusterState, LostNode
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import Evidence, has_ended, has_exited, is_done
from drumline.watch.failure_kind import FailureKind

NO_HEARTBEAT_S = 3.0

# a sidecar that exited is restarted within a second or two; until then connections are refused
_REFUSED_S = 5.0
_UNTRIED_S = 10.0
"""If no new connection was tried, or one succeeded: a sidecar without CPU time looks like a lost
host."""


def is_unreachable(node: LostNode) -> bool:
    """Whether a node is lost rather than late. If it accepts connections, the run may be fine."""
    if node.answer is Answer.TAKEN:
        return False

    limit_s = _REFUSED_S if node.answer is Answer.REFUSED else NO_HEARTBEAT_S
    if not node.how:
        limit_s = _UNTRIED_S
    return node.no_heartbeat_s >= limit_s


def find_unreachable(evidence: Evidence) -> Diagnosis | None:
    """Nodes that are lost; or this node, if it is the one that is cut off."""
    cluster = evidence.cluster
    lost = [node for node in cluster.lost if is_unreachable(node) and not was_done(cluster, node)]
    if not lost:
        return None
    if cluster.this_node.link or _hears_nobody(cluster, lost):
        return _cut_off(evidence, lost)

    return _lost(evidence, lost)


def _hears_nobody(cluster: ClusterState, lost: list[LostNode]) -> bool:
    """With three nodes or more, a node that gets no heartbeat from any other is itself cut off; with
    two, if the launcher cannot reach it either."""
    nodes = {node.node for node in cluster.nodes}
    connected = nodes - {node.node for node in lost}
    if not connected <= {cluster.me}:
        return False

    hears_no_launcher = cluster.launcher is not None and cluster.launcher.is_cut_off
    return len(lost) >= 2 or hears_no_launcher


def find_never_seen(evidence: Evidence) -> Diagnosis | None:
    """A host that was lost before its sidecar connected. Its port may be closed, so a rank must
    have lost a peer."""
    lost = [node for node in evidence.cluster.never_seen if node.how and is_unreachable(node)]
    has_lost_peer = any(rank.failure_kind is FailureKind.LOST_PEER for rank in evidence.ranks)
    return _lost(evidence, lost) if lost and has_lost_peer else None


def find_late_node(evidence: Evidence) -> Diagnosis | None:
    """A node without heartbeats that may still recover."""
    late = [node for node in evidence.cluster.lost if not was_done(evidence.cluster, node)]
    return _lost(evidence, late, is_certain=False) if late else None


def may_be_lost(cluster: ClusterState, since_s: float) -> bool:
    """Whether another node that had ranks left to run sent no heartbeat in the last `since_s`
    seconds. Its answer to a new connection does not count: a host that shuts down refuses
    connections first."""
    if cluster.never_seen:
        return True

    ages = cluster.this_node.heartbeat_age_s
    for node in cluster.nodes:
        # A node reports no ranks before it has seen them.
        has_ended = node.ranks and all(has_exited(rank) or is_done(rank) for rank in node.ranks)
        is_late = ages.get(node.node, 0.0) >= since_s
        if node.node != cluster.me and is_late and not has_ended:
            return True

    return False


def was_done(cluster: ClusterState, lost_node: LostNode) -> bool:
    """Whether its ranks were done in its last heartbeat: then its sidecar has exited too."""
    ranks = [rank for node in cluster.nodes if node.node == lost_node.node for rank in node.ranks]
    return bool(ranks) and all(map(is_done, ranks))


def _cut_off(evidence: Evidence, lost: list[LostNode]) -> Diagnosis:
    """That this host is the one without a connection."""
    me = evidence.cluster.this_node
    launcher = evidence.cluster.launcher

    why = f"{len(lost)} of {len(lost) + 1} nodes stopped sending heartbeats together"
    if me.link:
        why = me.link
    elif launcher is not None and launcher.is_cut_off:
        why = "no heartbeat from the launcher either"

    since_s = max(node.no_heartbeat_s for node in lost)
    what = (
        f"{me.host} is cut off from the other nodes: {why}; it has received no heartbeat from "
        f"{join_names(node.host for node in lost)} for {duration(since_s)}"
    )

    hosts = ",".join([me.host, *(node.host for node in lost[:3])])
    check = f"check the network interface, cable and security group of {me.host}: drumline doctor --hosts {hosts}"

    return _diagnosis(evidence, me.host, what, check, since_s)


def _lost(evidence: Evidence, lost: list[LostNode], *, is_certain: bool = True) -> Diagnosis:
    """That other hosts send no heartbeats."""
    cluster = evidence.cluster
    me = cluster.this_node.host
    first = max(lost, key=lambda node: node.no_heartbeat_s)
    host = first.host
    how = first.how or "it accepts connections, but its sidecar sends nothing"
    ranks = f", with {named_ranks(first.ranks)}" if first.ranks else ""
    other_hosts = [node.host for node in lost if node is not first]
    what = f"no heartbeat from {host} for {duration(first.no_heartbeat_s)} ({how}){ranks}"
    if other_hosts:
        what += f"; none from {join_names(other_hosts)} either"

    next_step = f"find out what ended the job on {host}; the host itself is up"
    if first.answer is Answer.NONE:
        next_step = (
            f"check whether {host} is up, then check cable and security group between {me} and {host}: "
            f"drumline doctor --hosts {me},{host}"
        )
        nodes = {node.node for node in cluster.nodes} | {node.node for node in lost}
        if len(nodes) == 2:
            what += _witness(cluster.launcher, first, me)

    return _diagnosis(evidence, host, what, next_step, first.no_heartbeat_s, is_certain=is_certain)


def _witness(launcher: LauncherLink | None, lost: LostNode, me: str) -> str:
    """Which of two nodes is cut off: each reports the same about the other, and the launcher may
    reach one."""
    if launcher is None or launcher.num_nodes != 2:
        return f"; with two nodes, either {lost.host} or {me} may be cut off"
    if lost.node in launcher.silent_nodes:
        return "; the launcher receives none from it either"

    return f"; the launcher receives heartbeats from both {lost.host} and {me}"


def _diagnosis(
    evidence: Evidence,
    host: str,
    what: str,
    next_step: str,
    since_s: float,
    *,
    is_certain: bool = True,
) -> Diagnosis:
    """Uncertain as long as no process is known to have ended: then the host may return."""
    may_return = is_certain and _are_healthy(evidence)
    steps = [rank.step for rank in evidence.ranks]

    return Diagnosis(
        cause=Cause.UNREACHABLE,
        host=host,
        rank=None,
        step=max(steps, default=0) if evidence.has_steps else None,
        what=what + evidence.blocked_ranks(),
        next_step=next_step,
        is_certain=is_certain and not may_return,
        since_s=since_s,
        may_return=may_return,
        num_blocked=len(evidence.blocked),
    )


def _are_healthy(evidence: Evidence) -> bool:
    """Whether no process is known to have ended: only heartbeats are missing."""
    if any(node.answer is Answer.REFUSED for node in evidence.cluster.lost):
        return False
    return not any(map(has_ended, evidence.cluster.ranks))
