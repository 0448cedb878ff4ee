"""What the leader knows of nodes that send no heartbeats any more, or never did."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from drumline.watch.cluster_state import Answer, NodeState
from drumline.watch.sidecar.leader import FIRST_CONNECTION_S, Leader
from drumline.watch.sidecar.local_ranks import LocalRanks
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import Peer, SidecarOptions

PEERS = tuple(
    Peer(number, f"node-{number}", f"10.0.0.{number}", 4000 + number) for number in (1, 2, 3)
)


def leader_of_four(folder: Path) -> tuple[Leader, SidecarNetwork]:
    options = SidecarOptions(
        folder=str(folder),
        owns_folder=False,
        node=0,
        host="node-0",
        ranks=(0,),
        world_size=4,
        peers=PEERS,
    )
    network = SidecarNetwork(
        me=0, peers=PEERS, secret=b"", on_message=lambda node, message: None, listener=None
    )
    return Leader(options, LocalRanks(options), network, cast(Any, None), lambda *_: None), network


def test_a_node_that_never_connected_is_not_a_lost_one(tmp_path: Path) -> None:
    leader, network = leader_of_four(tmp_path)
    now = time.monotonic()
    for peer in PEERS[:2]:
        leader.receive_heartbeat(
            peer.node, {"state": asdict(NodeState(node=peer.node, host=peer.host))}
        )
    network._started_at = now - 4
    network._heard_at = {1: now - 0.3, 2: now - 3}
    network._results |= {2: "connection refused", 3: "no answer"}
    cluster = leader.cluster()
    assert [(node.host, node.answer) for node in cluster.lost] == [("node-2", Answer.REFUSED)]
    ((host, how, answer, up_s),) = [
        (node.host, node.how, node.answer, node.no_heartbeat_s) for node in cluster.never_seen
    ]
    assert (host, how, answer) == ("node-3", "no answer", Answer.NONE)
    assert 4 <= up_s < 10, "there was no time to hear it before"
    # As of now, not of the last look at the ranks.
    ages = cluster.nodes[0].heartbeat_age_s
    assert (round(ages[1]), round(ages[2]), len(ages)) == (0, 3, 2)
    # By then the warning of a closed port is out.
    network._started_at = now - FIRST_CONNECTION_S - 1
    assert leader.cluster().never_seen == ()
