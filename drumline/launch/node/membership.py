"""Which of a job's nodes are alive: every launcher writes a heartbeat once a second to the first
node's store.

Each node has its NODE_RANK and its host: a second node with the same rank is refused, and missing
nodes are named. Wall clocks are not compared: the age of a heartbeat is the time since it last
changed, by the clock of its reader.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypedDict

import torch.distributed as dist

from drumline.base.errors import PreflightError
from drumline.base.job_secret import SECRET_ENV, derived
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import WaitNotice
from drumline.net.handshake import nonce
from drumline.rank.rendezvous.reachability import NodeCard
from drumline.rank.sealed_store import SealedStore, check_secret, decoded

HEARTBEAT_S = 1.0
# A node whose heartbeat has not changed for so many is not alive.
MISSED_HEARTBEATS = 5
# Of what nodes write for each other; raised when an earlier version could not read it.
FORM = 3
ANOTHER_PORT = "take another port: --port, --master ADDRESS:PORT or MASTER_PORT"
JOINING = "joining"
RUNNING = "running"
DONE = "done"


@dataclass(frozen=True)
class NodeHeartbeat:
    """The state that a launcher reports."""

    host: str
    launcher: str
    """Identifies one launcher; a node that was started again has a new one."""
    count: int = 0
    state: str = JOINING
    card: NodeCard | None = None
    """What the node publishes of itself for the round that it joins, or has joined."""

    def encode(self) -> str:
        """As it is stored; `decoded` of sealed_store.py reads it."""
        return json.dumps(vars(self))

    def is_newer(self, earlier: NodeHeartbeat) -> bool:
        """False for an older heartbeat of the same launcher, which was replayed."""
        return self.count > earlier.count if self.launcher == earlier.launcher else self != earlier


class PublishedJob(TypedDict):
    """What the first node publishes of the job."""

    job: str
    num_nodes: int
    nonce: str
    form: NotRequired[int]


class NodeFailure(TypedDict):
    """Why a node has ended the job."""

    sentence: str
    code: int


class Membership:
    """One launcher's heartbeat, and its view of all others.

    `store` is a separate connection: heartbeats continue while the rendezvous waits in the other
    one.
    """

    def __init__(self, store: dist.Store, node: NodePlan, secret: str | None = None) -> None:
        self.secret = secret
        """The secret that all nodes were given, after `check_job` the one of this launch; None:
        there is none."""
        self.store = SealedStore(store, secret, "drumline/membership")
        self.node = node
        self.heartbeat = NodeHeartbeat(socket.gethostname(), uuid.uuid4().hex)
        self.was_replaced = False
        self._replaced: set[str] = set()
        """Earlier launchers with this node's rank."""
        self._published: dict[str, tuple[SealedStore, str]] = {}
        """On the first node: values that are written once, and where they are stored."""
        self._last: dict[int, tuple[NodeHeartbeat, float]] = {}
        """Each node's last heartbeat, and when it was first seen here, by this machine's clock."""
        self._waiting: WaitNotice | None = None
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._send_heartbeats,
            name="drumline-heartbeat",
            daemon=True,
        )

    def check_job(self) -> None:
        """The first node publishes which job this is, and the others check that it is theirs. A
        node of another job would make the ranks restart repeatedly, to let in a node that does not
        belong to them."""
        node = self.node
        if node.node_rank == 0:
            job: PublishedJob = {
                "job": node.job,
                "num_nodes": node.num_nodes,
                "nonce": nonce(),
                "form": FORM,
            }
            self.publish("job", job)
            self._seal_launch(job)
            return

        job = self._published_job()
        if job["job"] != node.job:
            raise PreflightError(
                f"another job uses {node.endpoint}",
                next_step=f"wait for its end, or {ANOTHER_PORT}",
            )

        if job.get("form") != FORM:
            raise PreflightError(
                f"node 0 and node {node.node_rank} have different versions of drumline",
                next_step="install the same version of drumline on all nodes",
            )

        if job["num_nodes"] != node.num_nodes:
            raise PreflightError(
                f"the number of nodes differs: {job['num_nodes']} on node 0, {node.num_nodes} on node "
                f"{node.node_rank}; or another job uses {node.endpoint}",
                next_step="give all nodes the same number of nodes; another job needs another MASTER_PORT",
            )

        self._seal_launch(job)

    def publish(self, key: str, content: Mapping[str, Any]) -> None:
        """On the first node, for all: restored when another client deletes or overwrites it."""
        text = json.dumps(content)
        with self._lock:
            self._published[key] = (self.store, text)
            self.store.set(key, text)

    def _published_job(self) -> PublishedJob:
        """As the first node describes it."""
        published = None
        is_lost = False
        try:
            published = decoded(PublishedJob, self.store.get("job"))
        except dist.DistError:
            is_lost = True

        check_secret(self.store, "node 0")
        if published is not None:
            return published

        what = f"what listens at {self.node.endpoint} is not the launcher of node 0"
        next_step = f"check what it is, or {ANOTHER_PORT}"
        if self.store.foreign:
            what += f" of this job: its {SECRET_ENV} differs"
            next_step = f"set the same {SECRET_ENV} on all nodes, and check what listens there"

        error = PreflightError(what, next_step=next_step)
        error.lost_first_node = is_lost and not self.store.foreign
        raise error

    def _seal_launch(self, job: PublishedJob) -> None:
        """Switch to a secret of this launch: users may give several launches the same one, and
        values recorded in an earlier launch must not be valid."""
        if self.secret is not None:
            self.secret = derived(self.secret, "launch", job["nonce"])
            self.store = self.store.resealed(self.secret)

    def join(self) -> None:
        """Take this node's rank, unless a living launcher has it."""
        key = _key(self.node.node_rank)
        encoded = self.heartbeat.encode().encode()
        stored = self.store.compare_set(key, "", encoded)
        if stored != encoded:
            self._replace_launcher(key, stored, encoded)
        self.store.append("members", f"{self.node.node_rank} ")
        self._thread.start()

    def _replace_launcher(self, key: str, stored: bytes, encoded: bytes) -> None:
        """Of a launcher that exited and left its heartbeat; a living one changes it every second."""
        until = time.monotonic() + MISSED_HEARTBEATS * HEARTBEAT_S
        while time.monotonic() < until:
            if self.store.compare_set(key, "", stored) != stored:
                raise self._taken(stored)
            time.sleep(HEARTBEAT_S / 4)

        if self.store.compare_set(key, stored, encoded) != encoded:
            raise self._taken(stored)

        if earlier := decoded(NodeHeartbeat, stored):
            self._replaced.add(earlier.launcher)

    def leave(self) -> None:
        """Send no more heartbeats."""
        self._left.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * HEARTBEAT_S)

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """While this node waits for others, missing nodes are reported."""
        self.read()
        waiting = WaitNotice()
        self._waiting = waiting
        try:
            yield
        finally:
            # before its line is cleared: the thread would show it again
            self._waiting = None
            waiting.clear()

        self.set_state(RUNNING)

    def set_state(self, state: str) -> None:
        """Publish the state of this node, at once."""
        with self._lock:
            self._write(replace(self.heartbeat, state=state))

    def join_round(self, card: NodeCard) -> None:
        """Publish that this node waits for the next round, with this card."""
        with self._lock:
            self._write(replace(self.heartbeat, state=JOINING, card=card))

    def read(self) -> None:
        """Read all heartbeats: a few requests to the store, for any number of nodes."""
        # The list is not sealed, so nodes seen before are looked for as well.
        listed = self.store.hint("members").split()
        keys = {
            _key(rank): rank
            for rank in self._other_nodes
            if rank in self._last or str(rank).encode() in listed
        }
        for key, text in self.store.there(list(keys)).items():
            rank = keys[key]
            new = decoded(NodeHeartbeat, text)
            if new is not None and (rank not in self._last or new.is_newer(self._last[rank][0])):
                self._last[rank] = (new, time.monotonic())

    def is_alive(self, rank: int, *states: str, within_s: float | None = None) -> bool:
        """Whether that node's heartbeat has changed recently, and has one of these states if any is
        given."""
        if rank not in self._last:
            return False

        heartbeat, changed_at = self._last[rank]
        limit_s = MISSED_HEARTBEATS * HEARTBEAT_S if within_s is None else within_s
        has_state = not states or heartbeat.state in states
        return has_state and time.monotonic() - changed_at <= limit_s

    def is_silent(self, rank: int, *, for_s: float) -> bool:
        """Whether another node's heartbeat was seen, and has not changed for so long."""
        return rank in self._last and not self.is_alive(rank, within_s=for_s)

    def joining_cards(self) -> dict[int, NodeCard]:
        """What the other nodes published that join a round, at the last read."""
        return {
            rank: card
            for rank in self._other_nodes
            if self.is_alive(rank, JOINING) and (card := self._last[rank][0].card)
        }

    def count_alive(self) -> int:
        """The number of nodes that are not done, including this one, at the last read."""
        return 1 + sum(self.is_alive(rank, JOINING, RUNNING) for rank in self._other_nodes)

    def missing(self) -> list[int]:
        """Nodes that have not joined the rendezvous that this one waits in."""
        return [rank for rank in self._other_nodes if not self.is_alive(rank, JOINING)]

    @property
    def _other_nodes(self) -> list[int]:
        """By node rank, joined or not."""
        return [rank for rank in range(self.node.num_nodes) if rank != self.node.node_rank]

    def publish_failure(self, what: str, code: int) -> None:
        """Called before this node ends the job: publish why, and the exit code."""
        sentence = f"{self.name(self.node.node_rank)} ended the job: {what}"
        self.store.set("failed", json.dumps({"sentence": sentence, "code": code}))

    def failure(self) -> NodeFailure | None:
        """What the first failing node has published."""
        return decoded(NodeFailure, self.store.peek("failed"))

    def host(self, rank: int) -> str | None:
        """The user's name for a node's host, otherwise its own host name; None: unknown."""
        if rank < len(self.node.peers):
            return self.node.peers[rank]
        if rank == self.node.node_rank:
            return self.heartbeat.host
        return self._last[rank][0].host if rank in self._last else None

    def name(self, rank: int) -> str:
        """`node 2 (node-c)`."""
        host = self.host(rank)
        return f"node {rank} ({host})" if host else f"node {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        """Several nodes, for a message."""
        return ", ".join(map(self.name, ranks))

    def _send_heartbeats(self) -> None:
        """A thread: until this node leaves, send heartbeats and keep what is written once."""
        while not self._left.wait(HEARTBEAT_S):
            # When the store has closed, the thread that waits in it gets the same error, and
            # reports it. Another client may make one call fail.
            with contextlib.suppress(RuntimeError):
                with self._lock:
                    self._write(self.heartbeat)
                    self._restore()
                if (waiting := self._waiting) is not None:
                    self.read()
                    self._report_missing(waiting)

    def _report_missing(self, waiting: WaitNotice) -> None:
        """While this node waits: name the nodes that have not joined."""
        if missing := self.missing():
            waiting.report(
                f"waiting at {self.node.endpoint} for {self.names(missing)}, {waiting.waited_s:.0f} s so far"
            )

    def _restore(self) -> None:
        """Restore values that are written once, since anyone can delete them."""
        if str(self.node.node_rank).encode() not in self.store.hint("members").split():
            self.store.append("members", f" {self.node.node_rank} ")

        for key, (store, text) in self._published.items():
            if store.peek(key) != text.encode():
                store.set(key, text)

    def _write(self, heartbeat: NodeHeartbeat) -> None:
        """Publish this heartbeat, as the next one of this node."""
        new = replace(heartbeat, count=self.heartbeat.count + 1)
        key = _key(self.node.node_rank)
        text = self.store.compare_set(key, self.heartbeat.encode(), new.encode())
        stored = decoded(NodeHeartbeat, text)

        this_nodes_launchers = {self.heartbeat.launcher, *self._replaced}
        self.was_replaced = stored is not None and stored.launcher not in this_nodes_launchers
        # deleted, or an old value was replayed
        if stored != new and not self.was_replaced:
            self.store.set(key, new.encode())
        self.heartbeat = new

    def _taken(self, stored: bytes) -> PreflightError:
        """`stored`: the heartbeat of the launcher that has this rank."""
        rank = self.node.node_rank
        holder = decoded(NodeHeartbeat, stored)
        host = holder.host if holder else "another host"
        return PreflightError(
            f"NODE_RANK {rank} is taken: the launcher of node {rank} runs on {host}",
            next_step=f"give each machine a NODE_RANK of its own, from 0 to {self.node.num_nodes - 1}",
        )


def _key(rank: int) -> str:
    """Of the heartbeat of a node, in the store."""
    return f"node/{rank}"
