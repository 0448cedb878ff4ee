"""What the chief knows of nodes that it does not hear, or has never heard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from drumline.watch.facts import Answer, NodeFacts, to_json
from drumline.watch.sidecar.channel import Channel, Peer
from drumline.watch.sidecar.chief import Chief
from drumline.watch.sidecar.node import Node
from drumline.watch.sidecar.terms import Terms
from drumline.watch.sidecar.unheard import PATIENCE_S

PEERS = tuple(Peer(number, f"node-{number}", f"10.0.0.{number}", 4000 + number) for number in (1, 2, 3))


def chief_of_four(folder: Path) -> tuple[Chief, Channel]:
    terms = Terms(
        folder=str(folder), owns_folder=False, node=0, host="node-0", ranks=(0,), world_size=4, peers=PEERS
    )
    channel = Channel(me=0, peers=PEERS, secret=b"", on_message=lambda node, message: None, listener=None)
    return Chief(terms, Node(terms), channel, cast(Any, None), lambda *_: None), channel


def test_a_node_that_was_never_heard_is_told_apart_from_one_that_went_silent(tmp_path: Path) -> None:
    chief, channel = chief_of_four(tmp_path)
    now = time.monotonic()
    for peer in PEERS[:2]:
        chief.hear_pulse(peer.node, {"facts": to_json(NodeFacts(node=peer.node, host=peer.host))})
    channel._begun = now - 4
    channel._heard = {1: now - 0.3, 2: now - 3}
    channel._how |= {2: "connection refused", 3: "no answer"}
    seen = chief.picture()
    assert [(one.host, one.answer) for one in seen.silent] == [("node-2", Answer.REFUSED)]
    ((host, how, answer, up_s),) = [(one.host, one.how, one.answer, one.silent_s) for one in seen.unheard]
    assert (host, how, answer) == ("node-3", "no answer", Answer.NONE)
    assert 4 <= up_s < 10, "there was no time to hear it before"
    # As of now, not of the last look at the ranks.
    heard_s = seen.nodes[0].heard_s
    assert (round(heard_s[1]), round(heard_s[2]), len(heard_s)) == (0, 3, 2)
    # By then the warning of a closed port is out.
    channel._begun = now - PATIENCE_S - 1
    assert chief.picture().unheard == ()
