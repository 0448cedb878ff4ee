"""Hosts that are not heard, ways that are open in one direction only, and a node that is itself cut off."""

from __future__ import annotations

from drumline.text import number_ranges
from drumline.watch.cluster_state import Answer, ClusterState, LostNode, NodeState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.error_texts import is_lost_peer
from drumline.watch.diagnosis.evidence import Evidence, has_ended, is_done
from drumline.watch.diagnosis.phrases import seconds, who_waits

SILENT_S = 3.0
_REFUSED_S = 5.0
"""A sidecar that died is started again within a second or two, and refuses until then."""
_FRESH_S = 1.5
"""Pulses come twice a second. An older one may report a sidecar that had no CPU and has been heard since."""
_UNTRIED_S = 10.0
"""When a new connection was not tried, or came about: a sidecar without CPU is as silent as a host that is gone."""


def is_unreachable(one: LostNode) -> bool:
    """Whether a silent node is gone, rather than late. Where connections are taken, the run may be well."""
    if one.answer is Answer.TAKEN:
        return False
    if not one.how:
        return one.no_heartbeat_s >= _UNTRIED_S
    return one.no_heartbeat_s >= (_REFUSED_S if one.answer is Answer.REFUSED else SILENT_S)


def judge_reach(evidence: Evidence) -> Diagnosis | None:
    picture = evidence.picture
    me = next((node for node in picture.nodes if node.node == picture.me), None)
    gone = [one for one in picture.lost if is_unreachable(one) and not _is_done(picture, one)]
    if me is not None and gone and (me.link or _is_alone(picture, gone)):
        return _cut_off(evidence, me, gone)
    if me is not None and gone and (witness := _witness(picture, gone[0])):
        return _one_way(evidence, me, gone[0], witness)
    if gone:
        return _gone(evidence, gone)
    return _deaf(evidence)


def judge_unheard(evidence: Evidence) -> Diagnosis | None:
    """A host that was gone before its sidecar was ever heard. Its port alone may be closed: that it is gone is known by
    the ranks that have lost it."""
    gone = [one for one in evidence.picture.never_seen if one.how and is_unreachable(one)]
    has_lost = any(is_lost_peer(rank.failure) for rank in evidence.ranks)
    return _gone(evidence, gone) if gone and has_lost else None


def may_be_gone(picture: ClusterState, since_s: float) -> bool:
    """Whether another node that had ranks left to run was not heard in the last `since_s` seconds. How it is silent
    does not count: a host that goes down refuses connections first, and it takes seconds to learn that it answers no
    more."""
    me = next((node for node in picture.nodes if node.node == picture.me), None)
    heartbeat_age_s = {} if me is None else me.heartbeat_age_s
    running = [node.node for node in picture.nodes if node.node != picture.me and not _is_out(node)]
    return bool(picture.never_seen) or any(heartbeat_age_s.get(node, 0.0) >= since_s for node in running)


def _is_out(node: NodeState) -> bool:
    """Whether its ranks have ended; before it has seen them, its pulse has none."""
    return bool(node.ranks) and all(has_ended(rank) or is_done(rank) for rank in node.ranks)


def judge_late(evidence: Evidence) -> Diagnosis | None:
    """Silence that may still end."""
    late = [one for one in evidence.picture.lost if not _is_done(evidence.picture, one)]
    return _gone(evidence, late, is_certain=False) if late else None


def one_way(picture: ClusterState) -> tuple[NodeState, NodeState, float] | None:
    """(who is not heard, who does not hear it, for how long), of two nodes of which one hears the other."""
    silent = {one.node for one in picture.lost}
    nodes = {node.node: node for node in picture.nodes if node.node not in silent}
    found = [
        (nodes[speaker], listener, age)
        for listener in nodes.values()
        for speaker, age in listener.heartbeat_age_s.items()
        if speaker in nodes
        and age >= SILENT_S
        and nodes[speaker].heartbeat_age_s.get(listener.node, age) < _FRESH_S
    ]
    return max(found, key=lambda one: one[2]) if found else None


def _is_done(picture: ClusterState, one: LostNode) -> bool:
    """Whether its ranks had left in order when it was last heard: then its sidecar has left too."""
    last = [rank for node in picture.nodes if node.node == one.node for rank in node.ranks]
    return bool(last) and all(map(is_done, last))


def _is_alone(picture: ClusterState, gone: list[LostNode]) -> bool:
    """With three nodes or more, to hear none of them says more of oneself than of them."""
    return len(gone) >= 2 and all(node.node == picture.me for node in picture.nodes if not _is_in(node, gone))


def _is_in(node: NodeState, gone: list[LostNode]) -> bool:
    return any(one.node == node.node for one in gone)


def _witness(picture: ClusterState, one: LostNode) -> NodeState | None:
    """Another node, which still hears the one that is silent here."""
    return next(
        (
            node
            for node in picture.nodes
            if node.node not in (picture.me, one.node)
            and node.heartbeat_age_s.get(one.node, SILENT_S) < SILENT_S
        ),
        None,
    )


def _cut_off(evidence: Evidence, me: NodeState, gone: list[LostNode]) -> Diagnosis:
    why = me.link or f"{len(gone)} of {len(gone) + 1} nodes went silent together"
    hosts = _some([one.host for one in gone])
    return _diagnosis(
        evidence,
        me.host,
        f"{me.host} is cut off from the other nodes: {why}; it has not heard {hosts} for {seconds(_longest(gone))}",
        f"check the network interface, cable and security group of {me.host}: drumline doctor --hosts "
        + ",".join([me.host, *(one.host for one in gone[:3])]),
        gone,
    )


def _one_way(evidence: Evidence, me: NodeState, one: LostNode, witness: NodeState) -> Diagnosis:
    return _diagnosis(
        evidence,
        one.host,
        f"{me.host} has not heard {one.host} for {seconds(one.no_heartbeat_s)}, but {witness.host} hears it: the way "
        f"from {one.host} to {me.host} is closed",
        _between(one.host, me.host),
        [one],
    )


def _deaf(evidence: Evidence) -> Diagnosis | None:
    found = one_way(evidence.picture)
    if found is None:
        return None
    speaker, listener, age = found
    return _diagnosis(
        evidence,
        listener.host,
        f"{speaker.host} hears {listener.host}, but {listener.host} has not heard {speaker.host} for {seconds(age)}: "
        f"the way from {speaker.host} to {listener.host} is closed",
        _between(speaker.host, listener.host),
        [LostNode(node=listener.node, host=listener.host, ranks=(), no_heartbeat_s=age)],
    )


def _gone(evidence: Evidence, gone: list[LostNode], *, is_certain: bool = True) -> Diagnosis:
    first = max(gone, key=lambda one: one.no_heartbeat_s)
    how = f" ({first.how})" if first.how else " (it takes connections, but its sidecar says nothing)"
    own = (
        f", with {'rank' if len(first.ranks) == 1 else 'ranks'} {number_ranges(first.ranks)}"
        if first.ranks
        else ""
    )
    others = [one.host for one in gone if one is not first]
    too = f"; none from {_some(others)} either" if others else ""
    me = next((node.host for node in evidence.picture.nodes if node.node == evidence.picture.me), "this host")
    answers = first.answer is not Answer.NONE
    next_step = (
        f"see on {first.host} what ended the job there; the host itself answers"
        if answers
        else f"see whether {first.host} is up, then {_between(me, first.host)}"
    )
    what = f"no heartbeat from {first.host} for {seconds(first.no_heartbeat_s)}{how}{own}{too}"
    num_nodes = len({node.node for node in evidence.picture.nodes} | {one.node for one in gone})
    if num_nodes == 2 and not answers:  # the other one says the same of this one
        what += f"; of two nodes either may be cut off, {first.host} or {me}"
    return _diagnosis(evidence, first.host, what, next_step, gone, is_certain=is_certain)


def _between(one: str, other: str) -> str:
    return f"check cable and security group between {one} and {other}: drumline doctor --hosts {one},{other}"


def _some(hosts: list[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if hosts[4:] else "")


def _longest(gone: list[LostNode]) -> float:
    return max(one.no_heartbeat_s for one in gone)


def _diagnosis(
    evidence: Evidence, host: str, what: str, next_step: str, gone: list[LostNode], *, is_certain: bool = True
) -> Diagnosis:
    waits = who_waits(evidence, [])
    return Diagnosis(
        cause=Cause.UNREACHABLE,
        host=host,
        rank=None,
        step=max((rank.step for rank in evidence.ranks), default=0) if evidence.has_steps else None,
        what=f"{what}{waits}",
        next_step=next_step,
        is_certain=is_certain,
        since_s=_longest(gone),
        num_blocked=len(evidence.waiting),
    )
