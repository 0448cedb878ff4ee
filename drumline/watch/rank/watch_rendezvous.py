"""How sidecars find each other: the first rank of each node makes the watch folder, listens for other sidecars, and
publishes both; rank 0 hands it to all. What goes wrong on any node is raised on every rank alike."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drumline.distributed.start.rank_rendezvous import DECISION_GRACE_S, Rendezvous
from drumline.distributed.start.rank_store import agree
from drumline.errors import PreflightError
from drumline.launch.rank_environment import sidecar_secret
from drumline.launch.topology import Topology
from drumline.net.sealed_store import SealedStore
from drumline.net.secrets import new_secret
from drumline.watch.rank.node_watch import listen_for_sidecars, make_watch_folder, sidecar_address
from drumline.watch.sidecar.sidecar_options import Peer, SidecarOptions


def join_watch(
    rendezvous: Rendezvous | None, topology: Topology, *, folder: Path | None, timeout_s: float
) -> tuple[SidecarOptions, socket.socket | None]:
    """Collective. `folder`: the launcher's, if it gave any."""
    options = SidecarOptions(
        folder="", owns_folder=folder is None, node=0, host=topology.host, ranks=(0,), world_size=topology.world_size
    )
    if rendezvous is None:
        return replace(options, folder=str(make_watch_folder(folder)), secret=new_secret()), None
    store, deadline = rendezvous.store.under("watch"), time.monotonic() + timeout_s
    node, ranks = next((n, ranks) for n, ranks in enumerate(rendezvous.nodes) if topology.rank in ranks)
    is_first = topology.rank == ranks[0]
    made, listener = _publish(store, rendezvous, topology, node, folder) if is_first else (None, None)
    try:
        found = agree(
            store,
            topology,
            "decision/sidecars",
            lambda: _gather(store, rendezvous, deadline, timeout_s),
            deadline=deadline + DECISION_GRACE_S,
        )
    except BaseException as error:
        if listener is not None:
            listener.close()
        if made is not None:
            made.rmdir()
        if isinstance(error, dist.DistError):
            raise PreflightError(
                f"rank 0 did not publish within {timeout_s:g} s where the sidecars are",
                next_step="look at rank 0's own output",
            ) from error
        raise
    options = replace(
        options,
        folder=found["folders"][node],
        secret=sidecar_secret(store.secret, store.prefix) or "",
        peers=tuple(Peer(*peer) for number, peer in enumerate(found["peers"]) if number != node),
        node=node,
        ranks=tuple(ranks),
    )
    return options, listener


def _publish(
    store: SealedStore, rendezvous: Rendezvous, topology: Topology, node: int, folder: Path | None
) -> tuple[Path | None, socket.socket | None]:
    """On the first rank of a node: the folder if it was made here, and the socket. An error is published for rank 0,
    which raises it on all ranks."""
    made = listener = None
    try:
        here = make_watch_folder(folder)
        made = None if folder else here
        place: dict[str, Any] = {"folder": str(here)}
        if len(rendezvous.nodes) > 1:
            listener = listen_for_sidecars(sidecar_address(node, rendezvous.addresses))
            place["peer"] = [node, topology.host, *listener.getsockname()[:2]]
    except PreflightError as error:
        place = {"what": f"{error.what}, on {topology.host}", "next": error.next_step}
    store.set(f"place/{node}", json.dumps(place))
    return made, listener


def _gather(store: SealedStore, rendezvous: Rendezvous, deadline: float, timeout_s: float) -> dict[str, Any]:
    keys = [f"place/{node}" for node in range(len(rendezvous.nodes))]
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except dist.DistStoreError:
        missing = [node for node, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(f"rank {rendezvous.nodes[node][0]} on {rendezvous.hosts[node]}" for node in missing)
        raise PreflightError(
            f"{names} did not publish within {timeout_s:g} s where its sidecar is", next_step="look at its own output"
        ) from None
    places = [json.loads(text) for text in store.multi_get(keys)]
    for place in places:
        if "what" in place:
            raise PreflightError(place["what"], next_step=place["next"])
    return {
        "folders": [place["folder"] for place in places],
        "peers": [place["peer"] for place in places if "peer" in place],
    }
