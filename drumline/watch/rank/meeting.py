"""How the sidecars find each other: before they start, the ranks tell it through the store in which they have met.

Rank 0 hears who is where, and says which ranks make up a node. On each node the first rank makes the watch folder and
listens for the sidecars of other nodes, at the address that leads to them and no other; it keeps that socket, so a
sidecar that is started again has the same port. Rank 0 hears all of that too, and says it to all. What goes wrong
anywhere is raised on every rank alike.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drumline.distributed.start.absent import too_late
from drumline.distributed.start.ruling import follow, hear, rule
from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore
from drumline.launch.rank_environment import sidecar_secret
from drumline.launch.topology import Topology
from drumline.net.secrets import new_secret
from drumline.watch.rank.folder import make_folder
from drumline.watch.rank.listening import listen, own_address, way_out
from drumline.watch.rank.met import Met
from drumline.watch.rank.nodes import Standing, group_by_node, this_machine
from drumline.watch.sidecar.sidecar_options import Peer

GRACE_S = 2.0  # what rank 0 finds at its deadline is better told than what each other rank does at its own
WHO, WHERE = "nodes", "places"


def meet(
    store: SealedStore | None,
    *,
    topology: Topology,
    folder: Path | None,
    environment: Mapping[str, str],
    timeout_s: float = 180.0,
) -> Met:
    """Collective. `folder`: the launcher's, if it gave any. `environment`: says which network to take."""
    if store is None:
        return Met(make_folder(folder), new_secret(), (), 0, (0,), True, None)
    meeting = _Meeting(store.under("watch"), topology, time.monotonic() + timeout_s, timeout_s)
    try:
        return meeting.hold(folder, environment)
    except dist.DistError as error:
        raise PreflightError(
            f"rank 0 did not say within {timeout_s:g} s who is watched where",
            next_step="look at rank 0's own output",
        ) from error


class _Meeting:
    """One rank's part."""

    def __init__(self, store: SealedStore, topology: Topology, deadline: float, timeout_s: float) -> None:
        self.store, self.topology, self.deadline, self.timeout_s = store, topology, deadline, timeout_s
        self.listener: socket.socket | None = None
        self.made: Path | None = None
        """The folder, when it was made here: then it goes again if nothing comes of this."""

    def hold(self, folder: Path | None, environment: Mapping[str, str]) -> Met:
        self._come(environment)
        said = self._agree(WHO, self._see_who_is_here)
        nodes: list[list[int]] = said["nodes"]
        node, ranks = next((node, ranks) for node, ranks in enumerate(nodes) if self.topology.rank in ranks)
        is_first = self.topology.rank == ranks[0]
        if is_first:
            self._settle(node, folder, said["addresses"])
        try:
            places = self._agree(WHERE, lambda: self._see_where(nodes))
        except BaseException:
            self._undo()
            raise
        return Met(
            folder=Path(places["folders"][node]),
            secret=sidecar_secret(self.store.secret, self.store.prefix) or "",
            peers=tuple(Peer(*peer) for number, peer in enumerate(places["peers"]) if number != node),
            node=node,
            ranks=tuple(sorted(ranks)),
            is_first=is_first,
            listener=self.listener,
        )

    # First: who is here

    def _come(self, environment: Mapping[str, str]) -> None:
        card = {
            "host": self.topology.host,
            "machine": this_machine(),
            "local_rank": self.topology.local_rank,
            "address": way_out(environment, self.topology.master_addr),
        }
        self.store.set(f"card/{self.topology.rank}", json.dumps(card))

    def _see_who_is_here(self) -> dict[str, Any]:
        cards = self._read("card", range(self.topology.world_size), self._absent)
        nodes = group_by_node(
            {
                rank: Standing(card["host"], card["machine"], card["local_rank"])
                for rank, card in cards.items()
            }
        )
        return {"nodes": nodes, "addresses": [cards[ranks[0]]["address"] for ranks in nodes]}

    def _absent(self, missing: Sequence[int]) -> PreflightError:
        here = [rank for rank in range(self.topology.world_size) if rank not in missing]
        cards = self._read("card", here, self._absent)
        hosts = {rank: card["host"] for rank, card in cards.items()}
        return too_late(self.topology, hosts, timeout_s=self.timeout_s)

    # Then: where each node's sidecar will be

    def _settle(self, node: int, folder: Path | None, addresses: Sequence[str | None]) -> None:
        """On the first rank of a node. What goes wrong is told to rank 0, which tells all."""
        try:
            here = make_folder(folder)
            self.made = None if folder else here
            place: dict[str, Any] = {"folder": str(here)}
            if len(addresses) > 1:
                self.listener = listen(own_address(node, addresses))
                place["peer"] = [node, self.topology.host, *self.listener.getsockname()[:2]]
        except PreflightError as error:
            place = {"what": f"{error.what}, on {self.topology.host}", "next": error.next_step}
        self.store.set(f"place/{node}", json.dumps(place))

    def _undo(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.made is not None:
            self.made.rmdir()

    def _see_where(self, nodes: Sequence[Sequence[int]]) -> dict[str, Any]:
        def nowhere(missing: Sequence[int]) -> PreflightError:
            ranks = ", ".join(f"rank {nodes[node][0]} (node {node})" for node in missing)
            return PreflightError(
                f"{ranks} did not say within {self.timeout_s:g} s where the sidecar will be",
                next_step="look at its own output",
            )

        places = self._read("place", range(len(nodes)), nowhere)
        for place in places.values():
            if "what" in place:
                raise PreflightError(place["what"], next_step=place["next"])
        return {
            "folders": [place["folder"] for place in places.values()],
            "peers": [place["peer"] for place in places.values()] if len(nodes) > 1 else [],
        }

    # Both times

    def _agree(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 decides, all hear it."""
        if self.topology.rank == 0:
            ruling = rule(self.store, name, decide)
            listeners: Sequence[int] = range(1, self.topology.world_size)
        else:
            ruling, listeners = hear(self.store, name, deadline=self.deadline + GRACE_S), ()
        value: dict[str, Any] = follow(self.store, name, ruling, listeners=listeners)
        return value

    def _read(
        self, kind: str, numbers: Sequence[int], absent: Callable[[Sequence[int]], PreflightError]
    ) -> dict[int, dict[str, Any]]:
        keys = [f"{kind}/{number}" for number in numbers]
        try:
            self.store.wait(keys, timedelta(seconds=max(0.1, self.deadline - time.monotonic())))
        except dist.DistStoreError:
            raise absent(
                [number for number in numbers if not self.store.check([f"{kind}/{number}"])]
            ) from None
        texts = self.store.multi_get(keys) if keys else []
        return {number: json.loads(text) for number, text in zip(numbers, texts, strict=True)}
