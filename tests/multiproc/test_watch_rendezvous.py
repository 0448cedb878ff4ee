"""How the sidecars of a run find each other, on real ranks: by the rendezvous of these."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.base.errors import PreflightError
from drumline.base.rank_environment import Topology, WatchSettings, topology_from
from drumline.config.schema import WatchConfig
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous, StartOptions, join_rendezvous
from drumline.rank.rendezvous.rank_store import open_store
from drumline.rank.rendezvous.reachability import check_reachability
from drumline.rank.watched import node_watch
from drumline.rank.watched.node_watch import NodeWatch
from drumline.watch import watch_folder
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from tests.ranks import run_ranks

HOST = socket.gethostname()
Joined = tuple[Rendezvous, SidecarOptions, socket.socket | None]
TWO_NODES = {"local_rank": (0, 1, 0, 1), "local_world_size": (2, 2, 2, 2)}


class Rank:
    """Rendezvous one after the other, each under a name of its own."""

    def __init__(self) -> None:
        topology = topology_from(os.environ)
        assert topology is not None
        self.topology: Topology = topology
        self.rank = topology.rank
        self.store = open_store(replace(topology, secret="of the launcher"), timeout_s=30)

    def join(
        self, name: str, changed: Mapping[str, Any] | None = None, *, folder: Path | None = None
    ) -> Joined | str:
        """As `join_group`, without a group."""
        changes = {name: values[self.rank] for name, values in (changed or {}).items()}
        topology = replace(self.topology, **changes)
        try:
            with NodeWatch(topology, WatchConfig(), WatchSettings(folder=folder), run=None) as node:
                start = StartOptions(timeout_s=30, environment=os.environ, service=node)
                joined = join_rendezvous(self.store.under(name), topology, start)
                if len(joined.nodes) > 1:
                    joined = check_reachability(joined, topology, start, backend="gloo")
                options = node.options(joined)
                if self.rank == options.ranks[0]:
                    watch_folder.hold(Path(options.folder))  # as `WatchedRank` does
                return joined, options, options.listener
        except PreflightError as error:
            is_open = node.listener is not None and Path(f"/proc/self/fd/{node.listener}").exists()
            assert not is_open
            return str(error)

    def wait_for_all(self, name: str) -> None:
        self.store.add(name, 1)
        until = time.monotonic() + 60
        while self.store.add(name, 0) < self.topology.world_size:
            assert time.monotonic() < until
            time.sleep(0.01)


def facts(met: Joined | str) -> dict[str, Any]:
    """What can travel to the test; the folder and the socket are let go."""
    assert isinstance(met, tuple), met
    _, options, listener = met
    port = None
    if listener is not None:
        with socket.socket(fileno=listener) as opened:
            port = opened.getsockname()
    folder = Path(options.folder)
    return {
        **vars(options),
        "folder": folder,
        "listener": port,
        "mode": folder.stat().st_mode & 0o777,
    }


def watched(open_folder: Path, memory: Path) -> dict[str, Any]:
    me = Rank()
    results = {}
    # Others use the real ones at the same time.
    watch_folder.MEMORY = memory
    tempfile.tempdir = str(memory)

    results["one node"] = facts(me.join("one node"))

    two_nodes = me.join("two nodes", TWO_NODES)
    assert isinstance(two_nodes, tuple), two_nodes
    for peer in two_nodes[1].peers:
        socket.create_connection((peer.address, peer.port), timeout=10).close()
    me.wait_for_all("connected")
    results["two nodes"] = facts(two_nodes)
    keys = ("decision/joined", "decision/reachability", f"card/{me.rank}")
    results["in the store"] = [two_nodes[0].store.raw.get(key).decode() for key in keys]

    results["open folder"] = me.join(
        "open folder", TWO_NODES, folder=open_folder if me.rank == 2 else None
    )
    if me.rank == 2:
        # an address for examples
        node_watch.sidecar_address = lambda node, addresses: "192.0.2.1"
    results["no network"] = me.join("no network", TWO_NODES)
    me.wait_for_all("the end")
    me.store.add("gone", 1)
    while me.rank == 0 and me.store.add("gone", 0) < 4:  # it runs the store
        time.sleep(0.01)
    return results


def test_sidecars_find_each_other(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    memory = tmp_path / "shm"
    memory.mkdir()
    four = run_ranks(4, watched, open_folder, memory)

    one = [facts["one node"] for facts in four]
    assert all(met == one[0] for met in one)
    assert (one[0]["peers"], one[0]["listener"], one[0]["node"]) == ((), None, 0), (
        "no port is opened"
    )
    assert (one[0]["ranks"], one[0]["mode"]) == ((0, 1, 2, 3), 0o700)
    assert len(one[0]["secret"]) == 64
    assert one[0]["folder"].name.startswith(watch_folder.PREFIX)

    two = [facts["two nodes"] for facts in four]
    assert [(met["node"], met["ranks"]) for met in two] == [
        (0, (0, 1)),
        (0, (0, 1)),
        (1, (2, 3)),
        (1, (2, 3)),
    ], "of one name, and still two nodes"
    assert [met["listener"] is not None for met in two] == [True, False, True, False]
    assert len({met["secret"] for met in two}) == 1
    assert two[0]["secret"] != one[0]["secret"]
    assert two[0]["folder"] == two[1]["folder"] != two[2]["folder"] == two[3]["folder"]
    (peer,) = two[0]["peers"]
    assert (peer.node, peer.host, (peer.address, peer.port)) == (1, HOST, two[2]["listener"])
    assert two[3]["peers"][0].port == two[0]["listener"][1]

    (secret,) = {facts["two nodes"]["secret"] for facts in four}
    assert not {secret, "of the launcher"} & set(
        str([facts["in the store"] for facts in four]).split('"')
    )

    (said,) = {facts["open folder"] for facts in four}
    assert said.startswith(
        f"the watch folder {open_folder} cannot be used: it is open to others (mode 777), on {HOST}"
    )
    assert "leave DRUMLINE_WATCH_DIR to the launcher" in said
    (said,) = {facts["no network"] for facts in four}
    assert said.startswith(
        f"the watchdog cannot listen at 192.0.2.1: Cannot assign requested address, on {HOST}"
    )
    made = {facts[name]["folder"] for facts in four for name in ("one node", "two nodes")}
    assert set(memory.iterdir()) == made, "what came to nothing leaves no folder"


def test_alone_nothing_is_opened(tmp_path: Path) -> None:
    with NodeWatch(
        Topology(), WatchConfig(), WatchSettings(folder=tmp_path / "watch"), run=None
    ) as node:
        options = node.options(None)
    assert (options.folder, options.peers, node.listener, options.ranks) == (
        str(tmp_path / "watch"),
        (),
        None,
        (0,),
    )
    assert not options.owns_folder
