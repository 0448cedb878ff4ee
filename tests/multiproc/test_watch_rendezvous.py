"""How the sidecars of a run find each other, on real ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.distributed.start import rank_store
from drumline.distributed.start.rank_rendezvous import Rendezvous, join_rendezvous
from drumline.distributed.start.rank_store import open_store
from drumline.errors import PreflightError
from drumline.launch.node import watch_folder
from drumline.launch.topology import Topology, topology_from
from drumline.watch.rank import watch_rendezvous
from drumline.watch.rank.watch_rendezvous import join_watch
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from tests.ranks import run_ranks

HOST = socket.gethostname()
Watch = tuple[SidecarOptions, socket.socket | None]
TWO_NODES = {"local_rank": (0, 1, 0, 1), "local_world_size": (2, 2, 2, 2)}


class Rank:
    """Rendezvous one after the other, each under a name of its own."""

    def __init__(self) -> None:
        found = topology_from(os.environ)
        assert found is not None
        self.topology: Topology = found
        self.rank = found.rank
        self.store = open_store(replace(found, secret="of the launcher"), timeout_s=30)
        self.room = self.store

    def join(self, room: str, changed: Mapping[str, Any] | None = None) -> Rendezvous:
        self.room = self.store.under(room)
        changes = {name: values[self.rank] for name, values in (changed or {}).items()}
        self.topology = replace(self.topology, **changes)
        return join_rendezvous(
            self.room, self.topology, deadline=time.monotonic() + 30, timeout_s=30, environment=os.environ
        )

    def watch(self, rendezvous: Rendezvous, *, folder: Path | None = None, timeout_s: float = 30.0) -> Watch | str:
        try:
            return join_watch(rendezvous, self.topology, folder=folder, timeout_s=timeout_s)
        except PreflightError as error:
            return str(error)

    def wait_for_all(self, name: str) -> None:
        self.store.add(name, 1)
        until = time.monotonic() + 60
        while self.store.add(name, 0) < self.topology.world_size:
            assert time.monotonic() < until
            time.sleep(0.01)


def facts(met: Watch | str) -> dict[str, Any]:
    """What can travel to the test; the folder and the socket are let go."""
    assert isinstance(met, tuple), met
    options, listener = met
    port = None
    if listener is not None:
        port = listener.getsockname()
        listener.close()
    folder = Path(options.folder)
    return {**vars(options), "folder": folder, "listener": port, "mode": folder.stat().st_mode & 0o777}


def watched(open_folder: Path, memory: Path) -> dict[str, Any]:
    me, found = Rank(), {}
    watch_folder.MEMORY = memory  # others use the real one at the same time
    # How long rank 0 waits for ranks to read an error that are not there; all else takes no time.
    rank_store.READ_S = watch_rendezvous.DECISION_GRACE_S = 0.3

    found["one node"] = facts(me.watch(me.join("one node")))

    joined = me.join("two nodes", TWO_NODES)
    two_nodes = me.watch(joined)
    assert isinstance(two_nodes, tuple), two_nodes
    for peer in two_nodes[0].peers:
        socket.create_connection((peer.address, peer.port), timeout=10).close()
    me.wait_for_all("connected")
    found["two nodes"] = facts(two_nodes)

    found["in the store"] = [
        joined.store.raw.get(key).decode() for key in ("watch/decision/sidecars", f"card/{me.rank}")
    ]

    found["open folder"] = me.watch(me.join("open folder"), folder=open_folder if me.rank == 2 else None)

    silent = me.join("one is silent")
    if me.rank != 2:
        found["one is silent"] = me.watch(silent, timeout_s=0.5)
    silent = me.join("rank 0 is silent")
    if me.rank != 0:
        found["rank 0 is silent"] = me.watch(silent, timeout_s=0.5)
    me.wait_for_all("the end")
    me.store.add("gone", 1)
    while me.rank == 0 and me.store.add("gone", 0) < 4:  # it runs the store
        time.sleep(0.01)
    return found


def test_sidecars_find_each_other(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    memory = tmp_path / "shm"
    memory.mkdir()
    four = run_ranks(4, watched, open_folder, memory)

    one = [found["one node"] for found in four]
    assert all(met == one[0] for met in one)
    assert (one[0]["peers"], one[0]["listener"], one[0]["node"]) == ((), None, 0), "no port is opened"
    assert (one[0]["ranks"], one[0]["mode"]) == ((0, 1, 2, 3), 0o700)
    assert len(one[0]["secret"]) == 64
    assert one[0]["folder"].name.startswith(watch_folder.PREFIX)

    two = [found["two nodes"] for found in four]
    assert [(met["node"], met["ranks"]) for met in two] == [(0, (0, 1)), (0, (0, 1)), (1, (2, 3)), (1, (2, 3))], (
        "of one name, and still two nodes"
    )
    assert [met["listener"] is not None for met in two] == [True, False, True, False]
    assert len({met["secret"] for met in two}) == 1
    assert two[0]["secret"] != one[0]["secret"]
    assert two[0]["folder"] == two[1]["folder"] != two[2]["folder"] == two[3]["folder"]
    (peer,) = two[0]["peers"]
    assert (peer.node, peer.host, (peer.address, peer.port)) == (1, HOST, two[2]["listener"])
    assert two[3]["peers"][0].port == two[0]["listener"][1]

    (secret,) = {found["two nodes"]["secret"] for found in four}
    assert not {secret, "of the launcher"} & set(str([found["in the store"] for found in four]).split('"'))

    (said,) = {found["open folder"] for found in four}
    assert said.startswith(f"the watch folder {open_folder} is open to others (mode 777, 700 is needed), on {HOST}")
    (said,) = {four[rank]["one is silent"] for rank in (0, 1, 3)}
    assert said == (
        f"rank 2 on {HOST} did not publish within 0.5 s where its sidecar is\n  try: look at its own output"
    )
    (said,) = {four[rank]["rank 0 is silent"] for rank in (1, 2, 3)}
    assert said == ("rank 0 did not publish within 0.5 s where the sidecars are\n  try: look at rank 0's own output")
    names = ("one node", "two nodes")
    made = {found[name]["folder"] for found in four for name in names}
    assert set(memory.iterdir()) == made, "what came to nothing leaves no folder"


def test_alone_nothing_is_opened(tmp_path: Path) -> None:
    options, listener = join_watch(None, Topology(), folder=tmp_path / "watch", timeout_s=30.0)
    assert (options.folder, options.peers, listener, options.ranks) == (str(tmp_path / "watch"), (), None, (0,))
    assert not options.owns_folder
