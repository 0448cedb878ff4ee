"""The roll call: every rank says in the store who it is and what it is about to run. Rank 0 looks at all of it.

A rank that has not come is named while the others wait. Ranks that are here but are about to run something else are
named too, with the value of each: before there is a group, because ranks of two versions may not get one.

torchrun's own store outlives a restart, and what an earlier start left there looks like ranks that are here. So rank 0
opens each meeting under a name of its own, and a rank believes it only when its own name is on the list.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import blake3

from drumline.distributed.start.absent import first_is_late, too_late, waiting_for, waiting_for_first
from drumline.distributed.start.fact_differences import Facts, check_differences
from drumline.distributed.start.meeting import FIRST_NOTICE_S
from drumline.distributed.start.ruling import Ruling, follow, has_ruled, hear, rule
from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore, check_secret, document
from drumline.launch.topology import Topology
from drumline.net.dial import WaitNotice
from drumline.net.secrets import VARIABLE, KeyPair, new_secret
from drumline.terminal import print_message

FIRST_POLL_S, LAST_POLL_S = 0.01, 0.2
GRACE_S = 2.0  # what rank 0 finds at its deadline is better told than what each other rank does at its own
CURRENT = "meeting"
CARD: dict[str, type] = {"name": str, "host": str, "local_rank": int, "digest": str}
ROLL = "roll"


@dataclass(frozen=True)
class Meeting:
    """All ranks of one start: the store's part that is theirs alone, and their hosts by the first rank on each."""

    store: SealedStore
    hosts: dict[int, str]


def call_roll(
    store: SealedStore,
    topology: Topology,
    *,
    deadline: float,
    timeout_s: float,
    facts: Facts | None = None,
    gpu: str | None = None,
) -> Meeting:
    """Collective: wait until every rank has said its name, and compare what they are about to run.

    `gpu`: the one that this rank must have to itself.
    """
    who = _Attendance(store, topology, timeout_s, facts or {}, gpu)
    ruling = who.lead(deadline) if topology.rank == 0 else who.join(deadline)
    listeners = [int(rank) for rank in ruling["names"] if int(rank) > 0] if topology.rank == 0 else []
    value = follow(who.room, ROLL, ruling, listeners=listeners)
    if value["world_size"] != topology.world_size:
        raise PreflightError(
            f"ranks differ in their number: rank 0 is one of {value['world_size']}, rank {topology.rank} on "
            f"{topology.host} one of {topology.world_size}",
            next_step="start every node with the same number of nodes and ranks",
        )
    return Meeting(who.sealed_room(ruling), {int(rank): host for rank, host in value["hosts"].items()})


class _Attendance:
    """One rank's part in the roll call."""

    def __init__(
        self, store: SealedStore, topology: Topology, timeout_s: float, facts: Facts, gpu: str | None
    ) -> None:
        self.store, self.topology, self.timeout_s, self.gpu = store, topology, timeout_s, gpu
        self.facts = json.dumps(facts, sort_keys=True)
        self.name = secrets.token_hex(4)
        """Of this process, in this start."""
        self.keys = KeyPair() if store.secret is None else None
        self.secret = new_secret() if store.secret is None else store.secret
        self.room = store
        self.room_name = ""
        self.notice = WaitNotice(first_s=min(FIRST_NOTICE_S, timeout_s / 4))
        self.pause_s = FIRST_POLL_S

    def lead(self, deadline: float) -> Ruling:
        """On rank 0: open the meeting, wait for all, and rule."""
        opened = json.dumps({"room": self.name, "host": self.topology.host})
        self.store.set(CURRENT, opened)
        self._enter(self.name)
        everyone = [_card(rank) for rank in range(self.topology.world_size)]
        while not self.room.check(everyone):
            if time.monotonic() > deadline:
                break
            current = self.store.compare_set(CURRENT, "", opened)
            if current != opened.encode() and (other := document(current, host=str)):
                raise _double(self.topology, other["host"])
            self._wait()
        cards = self._cards()
        names = {rank: [card["name"], card["host"]] for rank, card in cards.items()}
        return rule(self.room, ROLL, self._decide, names=names, keys=self._wrapped(cards))

    def join(self, deadline: float) -> Ruling:
        """On the other ranks: enter whatever meeting is the current one, until one has this rank on its list."""
        other = None
        while True:
            if current := document(self.store.peek(CURRENT) or b"", room=str):
                self._enter(current["room"])
                if has_ruled(self.room, ROLL):
                    ruling = hear(self.room, ROLL, deadline=deadline)
                    other, host = ruling["names"].get(str(self.topology.rank), (None, ""))
                    if other == self.name or (other is None and "what" not in ruling):
                        return ruling
            check_secret(self.store, "rank 0")
            if time.monotonic() > deadline + (GRACE_S if self.room_name else 0):
                raise _double(self.topology, host) if other else self._too_late()
            self._wait()

    def _enter(self, room: str) -> None:
        if room == self.room_name:
            return
        self.room, self.room_name = self.store.under(room), room
        self.room.set(f"facts/{self.topology.rank}", self.facts)
        card = {
            "name": self.name,
            "host": self.topology.host,
            "local_rank": self.topology.local_rank,
            "gpu": self.gpu,
            "digest": blake3.blake3(self.facts.encode()).hexdigest(16),
            "public": self.keys and self.keys.public,
        }
        self.room.set(_card(self.topology.rank), json.dumps(card))

    def _wrapped(self, cards: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
        """On rank 0, where ranks were given no secret: one for this start, wrapped for each of the others."""
        if self.keys is None:
            return None
        wrapped = {
            rank: self.keys.wrap(self.secret, card.get("public"), self.room_name, str(rank))
            for rank, card in cards.items()
            if rank > 0
        }
        return {"public": self.keys.public, "wrapped": wrapped}

    def sealed_room(self, ruling: Ruling) -> SealedStore:
        """The room, in which from now on only ranks of this start are believed."""
        if self.keys is None:
            return self.room
        if (rank := self.topology.rank) > 0:
            keys = ruling["keys"]
            wrapped = str(keys["wrapped"].get(str(rank)))
            secret = self.keys.wrap(wrapped, keys["public"], self.room_name, str(rank))
            if secret is None:
                raise PreflightError(
                    f"rank 0 did not give rank {rank} on {self.topology.host} a secret: another version, or a stranger",
                    next_step=f"install the same version on all nodes, and set {VARIABLE} to one value on all",
                )
            self.secret = secret
        return self.room.resealed(self.secret)

    def _decide(self) -> dict[str, Any]:
        cards = self._cards()
        ranks = range(self.topology.world_size)
        if len(cards) < len(ranks):
            raise self._too_late()
        if any(card["digest"] != cards[0]["digest"] for card in cards.values()):
            texts = self.room.multi_get([f"facts/{rank}" for rank in ranks])
            check_differences(
                [document(text) or {} for text in texts], [cards[rank]["host"] for rank in ranks]
            )
        _refuse_shared_gpus(cards)
        hosts = {rank: card["host"] for rank, card in cards.items() if card["local_rank"] == 0}
        return {"world_size": len(ranks), "hosts": hosts}

    def _cards(self) -> dict[int, dict[str, Any]]:
        """Of those that are here."""
        ranks = {_card(rank): rank for rank in range(self.topology.world_size)}
        cards = {ranks[key]: document(text, **CARD) for key, text in self.room.there(list(ranks)).items()}
        return {rank: card for rank, card in cards.items() if card is not None}

    def _wait(self) -> None:
        if self.notice.is_due():
            self._say()
        time.sleep(self.pause_s)
        self.pause_s = min(LAST_POLL_S, self.pause_s * 1.3)

    def _say(self) -> None:
        """Once on each host, and after that from one rank alone."""
        hosts = self._hosts() if self.room_name else {}
        is_first = self.topology.rank == min(hosts, default=1)
        text = waiting_for(self.topology, hosts) if hosts else waiting_for_first(self.topology)
        if text and (is_first or (self.topology.local_rank == 0 and self.notice.count == 1)):
            print_message(f"{text} ({self.notice.waited_s:.0f} s of {self.timeout_s:g} s)")

    def _hosts(self) -> dict[int, str]:
        return {rank: card["host"] for rank, card in self._cards().items()}

    def _too_late(self) -> PreflightError:
        if not self.room_name:
            return first_is_late(self.topology, timeout_s=self.timeout_s)
        return too_late(self.topology, self._hosts(), timeout_s=self.timeout_s)


def _card(rank: int) -> str:
    return f"card/{rank}"


def _refuse_shared_gpus(cards: Mapping[int, Mapping[str, Any]]) -> None:
    """Two ranks on one GPU would wait for each other in NCCL."""
    first: dict[str, int] = {}
    for rank, card in cards.items():
        other = first.setdefault(str(card["gpu"]), rank) if card.get("gpu") else rank
        if other != rank:
            raise PreflightError(
                f"ranks {other} and {rank} on {card['host']} would compute on one GPU, {card['gpu']}",
                next_step="start at most as many ranks on a host as it has GPUs; with srun, give each task its own "
                "(--gpus-per-task=1) or all of them (--gpus-per-node); or use --dist.device cpu",
            )


def _double(topology: Topology, host: str) -> PreflightError:
    if topology.rank > 0 and host == topology.host:
        return PreflightError(
            f"rank 0 went on with an earlier rank {topology.rank} on {host}, and did not start again",
            next_step="stop what is left of the earlier start; look at rank 0's own output",
        )
    return PreflightError(
        f"there are two ranks {topology.rank}: one on {host}, and this one on {topology.host}",
        next_step="give every node its own --node-rank (NODE_RANK), and every rank its own RANK",
    )
