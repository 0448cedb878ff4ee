"""Nodes that send no heartbeats, networks that drop one direction, and a node that is itself cut
off."""

from __future__ import annotations

from dataclasses import replace

from drumline.base.rank_environment import LauncherLink
from drumline.base.text import duration, join_names, named_ranks
from drumline.watch.cluster_state import Answer, ClusterState, LostNode, NodeState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import Evidence, has_exited, is_done
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase

NO_HEARTBEAT_S = 3.0
# a sidecar that exited is restarted within a second or two; until then connections are refused
_REFUSED_S = 5.0
_FRESH_S = 1.5
"""Heartbeats are sent twice a second. An older age may be from a sidecar that had no CPU time."""
_UNTRIED_S = 10.0
"""If no new connection was tried, or one succeeded: a sidecar without CPU time looks like a lost
host."""


def is_unreachable(one: LostNode) -> bool:
    """Whether a node is lost rather than late. If it accepts connections, the run may be fine."""
    if one.answer is Answer.TAKEN:
        return False
    if not one.how:
        return one.no_heartbeat_s >= _UNTRIED_S
    return one.no_heartbeat_s >= (_REFUSED_S if one.answer is Answer.REFUSED else NO_HEARTBEAT_S)


def find_unreachable(evidence: Evidence) -> Diagnosis | None:
    cluster = evidence.cluster
    me = _own_node(evidence.cluster)
    lost = [one for one in cluster.lost if is_unreachable(one) and not _was_done(cluster, one)]
    if lost and me is not None:
        # With three nodes or more, a node that gets no heartbeat from any other is itself cut off.
        others = {node.node for node in cluster.nodes} - {cluster.me, *(one.node for one in lost)}
        hears_no_launcher = cluster.launcher is not None and cluster.launcher.is_cut_off
        if me.link or (not others and (len(lost) >= 2 or hears_no_launcher)):
            return _cut_off(evidence, me, lost)
        first = lost[0]
        for node in cluster.nodes:
            is_other = node.node not in (cluster.me, first.node)
            if is_other and node.heartbeat_age_s.get(first.node, NO_HEARTBEAT_S) < NO_HEARTBEAT_S:
                what = _dropped(first.host, me.host, first.no_heartbeat_s, f"{node.host} has")
                next_step = _check_between(first.host, me.host)
                return _diagnosis(evidence, first.host, what, next_step, first.no_heartbeat_s)
    if lost:
        return _lost(evidence, lost)
    if (found := one_way(cluster)) is None:
        return None
    sender = found[0].host
    receiver = found[1].host
    age_s = found[2]
    what = _dropped(sender, receiver, age_s, f"{sender} receives those of {receiver}")
    return _diagnosis(evidence, receiver, what, _check_between(sender, receiver), age_s)


def find_never_seen(evidence: Evidence) -> Diagnosis | None:
    """A host that was lost before its sidecar connected. Its port may be closed, so a rank must
    have lost a peer."""
    lost = [one for one in evidence.cluster.never_seen if one.how and is_unreachable(one)]
    has_lost_peer = any(rank.failure_kind is FailureKind.LOST_PEER for rank in evidence.ranks)
    return _lost(evidence, lost) if lost and has_lost_peer else None


def find_late_node(evidence: Evidence) -> Diagnosis | None:
    """A node without heartbeats that may still recover."""
    late = [one for one in evidence.cluster.lost if not _was_done(evidence.cluster, one)]
    return _lost(evidence, late, is_certain=False) if late else None


def may_be_lost(cluster: ClusterState, since_s: float) -> bool:
    """Whether another node that had ranks left to run sent no heartbeat in the last `since_s`
    seconds. Its answer to a new connection does not count: a host that shuts down refuses
    connections first."""
    me = _own_node(cluster)
    ages = {} if me is None else me.heartbeat_age_s
    return bool(cluster.never_seen) or any(
        ages.get(node.node, 0.0) >= since_s
        for node in cluster.nodes
        # A node reports no ranks before it has seen them.
        if node.node != cluster.me
        and not (node.ranks and all(has_exited(rank) or is_done(rank) for rank in node.ranks))
    )


def one_way(cluster: ClusterState) -> tuple[NodeState, NodeState, float] | None:
    """(sender, receiver, for how long) if heartbeats do not arrive, but those in the other
    direction do."""
    lost = {one.node for one in cluster.lost}
    nodes = {
        node.node: node for node in cluster.nodes if node.node not in lost and not _is_done(node)
    }
    found = [
        (nodes[sender], receiver, age_s)
        for receiver in nodes.values()
        for sender, age_s in receiver.heartbeat_age_s.items()
        if sender in nodes
        and age_s >= NO_HEARTBEAT_S
        and nodes[sender].heartbeat_age_s.get(receiver.node, age_s) < _FRESH_S
    ]
    return max(found, key=lambda one: one[2]) if found else None


def _own_node(cluster: ClusterState) -> NodeState | None:
    return next((node for node in cluster.nodes if node.node == cluster.me), None)


def _was_done(cluster: ClusterState, one: LostNode) -> bool:
    return any(node.node == one.node and _is_done(node) for node in cluster.nodes)


def _is_done(node: NodeState) -> bool:
    """Whether its ranks were done in its last heartbeat: then its sidecar has exited too."""
    return bool(node.ranks) and all(map(is_done, node.ranks))


def _cut_off(evidence: Evidence, me: NodeState, lost: list[LostNode]) -> Diagnosis:
    why = f"{len(lost)} of {len(lost) + 1} nodes stopped sending heartbeats together"
    if evidence.cluster.launcher is not None and evidence.cluster.launcher.is_cut_off:
        why = "no heartbeat from the launcher either"
    why = me.link or why
    since_s = max(one.no_heartbeat_s for one in lost)
    what = (
        f"{me.host} is cut off from the other nodes: {why}; it has received no heartbeat from "
        f"{join_names(one.host for one in lost)} for {duration(since_s)}"
    )
    hosts = ",".join([me.host, *(one.host for one in lost[:3])])
    check = f"check the network interface, cable and security group of {me.host}: drumline doctor --hosts {hosts}"
    return _diagnosis(evidence, me.host, what, check, since_s)


def _dropped(sender: str, receiver: str, age_s: float, but: str) -> str:
    return (
        f"{receiver} has received no heartbeat from {sender} for {duration(age_s)}, but {but}: the network drops "
        f"packets from {sender} to {receiver}"
    )


def _lost(evidence: Evidence, lost: list[LostNode], *, is_certain: bool = True) -> Diagnosis:
    cluster = evidence.cluster
    own = _own_node(evidence.cluster)
    me = "this host" if own is None else own.host
    first = max(lost, key=lambda one: one.no_heartbeat_s)
    host = first.host
    how = first.how or "it accepts connections, but its sidecar sends nothing"
    ranks = f", with {named_ranks(first.ranks)}" if first.ranks else ""
    others = [one.host for one in lost if one is not first]
    what = f"no heartbeat from {host} for {duration(first.no_heartbeat_s)} ({how}){ranks}"
    what += f"; none from {join_names(others)} either" if others else ""
    next_step = f"find out what ended the job on {host}; the host itself is up"
    if first.answer is Answer.NONE:
        next_step = f"check whether {host} is up, then {_check_between(me, host)}"
        if len({node.node for node in cluster.nodes} | {one.node for one in lost}) == 2:
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


def _check_between(one: str, other: str) -> str:
    return f"check cable and security group between {one} and {other}: drumline doctor --hosts {one},{other}"


def _diagnosis(
    evidence: Evidence,
    host: str,
    what: str,
    next_step: str,
    since_s: float,
    *,
    is_certain: bool = True,
) -> Diagnosis:
    what += evidence.blocked_ranks()
    diagnosis = evidence.diagnosis(
        host, Cause.UNREACHABLE, what, next_step, is_certain=is_certain, since_s=since_s
    )
    if is_certain and _are_healthy(evidence):
        return replace(diagnosis, is_certain=False, may_return=True)
    return diagnosis


def _are_healthy(evidence: Evidence) -> bool:
    """Whether no process is known to have ended: only heartbeats are missing."""
    if any(node.answer is Answer.REFUSED for node in evidence.cluster.lost):
        return False
    ranks = evidence.cluster.ranks
    return not any(has_exited(rank) or rank.failure or rank.phase is Phase.FAILED for rank in ranks)
