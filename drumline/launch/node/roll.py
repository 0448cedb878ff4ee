"""Who of a job's nodes is there: every launcher says so once a second, in the store that the first one keeps.

c10d's own rendezvous knows participants, but no names, and says nothing while it waits. The roll knows each node by the
NODE_RANK it was given and by its host: it refuses a second node with a rank that is taken, and names who is missing.
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
from typing import Any

import torch.distributed as dist

from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore, check_secret, document
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import WaitNotice
from drumline.net.handshake import nonce
from drumline.net.secrets import VARIABLE, derived

BEAT_S = 1.0
# A node that was not heard for so many beats is not there.
QUIET_BEATS = 5
MEETS, WORKS, DONE = "meets", "works", "done"


@dataclass(frozen=True)
class Word:
    """What a launcher says of itself."""

    host: str
    who: str
    """One launcher's own; a node that was started anew has another."""
    count: int = 0
    doing: str = MEETS

    def encode(self) -> str:
        return json.dumps(vars(self))

    def is_newer(self, other: Word) -> bool:
        """An older word of the same launcher is one that a stranger has recorded, and put back."""
        return self.count > other.count if self.who == other.who else self != other

    @classmethod
    def decode(cls, text: bytes | str) -> Word | None:
        """None for what is no such word: without a secret, strangers write there too."""
        found = document(text, host=str, who=str, count=int, doing=str)
        return None if found is None else cls(found["host"], found["who"], found["count"], found["doing"])


class Roll:
    """One launcher's place on the roll, and its view of all others.

    `store` is a connection of its own: the roll goes on while the rendezvous waits in the other one.
    """

    def __init__(self, store: dist.Store, node: NodePlan, secret: str | None = None) -> None:
        self.secret = secret
        """What all nodes were given, and after `check_job` that of this launch; None: they were given nothing."""
        self.store = SealedStore(store, secret, "drumline/roll")
        self.node = node
        self.mine = Word(socket.gethostname(), uuid.uuid4().hex)
        self.was_ousted = False
        self._replaced: set[str] = set()
        """Launchers that had this node's place before."""
        self._job: tuple[SealedStore, str] | None = None
        """On the first node: which job meets here, and where it is written."""
        self._heard: dict[int, tuple[Word, float]] = {}
        # What a node last said, and when that was new here, by this machine's own clock.
        self._waiting: WaitNotice | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._go_on, name="drumline-roll", daemon=True)

    def check_job(self) -> None:
        """The first node says which job meets here, and the others see that it is theirs. One of another job would have
        its ranks started again and again, to let in a node that never belongs."""
        mine = {"job": self.node.job, "num_nodes": self.node.num_nodes, "nonce": nonce()}
        if self.node.node_rank == 0:
            self._job = self.store, json.dumps(mine)
            self.store.set("job", json.dumps(mine))
            self._seal_launch(mine)
            return
        where = self.node.endpoint
        try:
            found = document(self.store.get("job"), job=str, num_nodes=int, nonce=str)
        except dist.DistError:
            found = None
        check_secret(self.store, "node 0")
        if found is None:
            knows = f" of this job: it does not know its {VARIABLE}" if self.store.strange else ""
            raise PreflightError(
                f"what listens at {where}, where the nodes meet, is not the launcher of node 0{knows}",
                next_step=f"set the same {VARIABLE} on all nodes, and see what listens there"
                if knows
                else "see what it is, or take another port: --port, or MASTER_PORT",
            )
        if found["job"] != mine["job"]:
            raise PreflightError(
                f"another job meets at {where}", next_step="wait for its end, or take another port: --port N"
            )
        if found["num_nodes"] != mine["num_nodes"]:
            raise PreflightError(
                f"node 0 counts {found['num_nodes']} nodes and node {self.node.node_rank} {mine['num_nodes']}, "
                f"or another job meets at {where}",
                next_step="give all nodes the same number of nodes; another job needs another MASTER_PORT",
            )

        self._seal_launch(found)

    def _seal_launch(self, job: Mapping[str, Any]) -> None:
        """From here on under a secret of this launch: users give several launches the same one, and what a stranger has
        recorded of an earlier launch shall not fit."""
        if self.secret is not None:
            self.secret = derived(self.secret, "launch", job["nonce"])
            self.store = self.store.resealed(self.secret)

    def sign_in(self) -> None:
        """Take this node's place, unless a launcher that lives has it."""
        key, mine = _key(self.node.node_rank), self.mine.encode().encode()
        found = self.store.compare_set(key, "", mine)
        if found != mine:
            # One that died left its word; one that lives says something new every second.
            notice = WaitNotice()
            while notice.waited_s < QUIET_BEATS * BEAT_S:
                if self.store.compare_set(key, "", found) != found:
                    raise self._taken(found)
                time.sleep(BEAT_S / 4)
            if self.store.compare_set(key, found, mine) != mine:
                raise self._taken(found)
            if word := Word.decode(found):
                self._replaced.add(word.who)
        self.store.append("members", f"{self.node.node_rank} ")
        self._thread.start()

    def sign_out(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_S)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While this node waits for others: who is missing is said, soon and then now and then."""
        self.now(MEETS)
        self.hear()
        self._waiting = WaitNotice()
        try:
            yield
        finally:
            waiting, self._waiting = self._waiting, None
            waiting.clear()
        self.now(WORKS)

    def now(self, doing: str) -> None:
        """Tell the others what this node does, at once."""
        with self._lock:
            self._say_word(replace(self.mine, doing=doing))

    def hear(self) -> None:
        """What all have said; a few questions to the store, however many they are."""
        numbers = range(self.node.num_nodes)
        # Only whom to look for: it is not sealed, and who was there once is looked for again.
        words = set(self.store.hint("members").split())
        come = {number for number in numbers if str(number).encode() in words}
        keys = {_key(rank): rank for rank in sorted({*come, *self._heard} - {self.node.node_rank})}
        for key, text in self.store.there(list(keys)).items() if keys else ():
            rank, word = keys[key], Word.decode(text)
            if word is not None and (rank not in self._heard or word.is_newer(self._heard[rank][0])):
                self._heard[rank] = (word, time.monotonic())

    def is_there(self, rank: int, *doing: str, within_s: float | None = None) -> bool:
        """Whether that node was heard lately, and does one of these if any is named."""
        if rank not in self._heard:
            return False
        word, at = self._heard[rank]
        limit_s = QUIET_BEATS * BEAT_S if within_s is None else within_s
        return time.monotonic() - at <= limit_s and (not doing or word.doing in doing)

    def count_living(self) -> int:
        """Nodes that have not ended, this one included, as of the last look."""
        return 1 + sum(
            self.is_there(rank, MEETS, WORKS)
            for rank in range(self.node.num_nodes)
            if rank != self.node.node_rank
        )

    def tell_failure(self, what: str, code: int) -> None:
        """Before this node ends the job: the others shall know who did, and why, and with which exit code."""
        self.store.set("failed-code", str(int(code)))
        self.store.set("failed", f"{self.name(self.node.node_rank)} ended the job: {what}")

    def failure(self) -> str | None:
        """What the first node that gave up has told."""
        found = self.store.peek("failed")
        return None if found is None else found.decode(errors="replace")

    def failure_code(self) -> int | None:
        """What it ended with."""
        code = self.store.peek("failed-code") or b""
        return int(code) if code.isdigit() and len(code) <= 3 else None

    def missing(self) -> list[int]:
        """Nodes that have not come to the meeting in which this one waits."""
        others = (rank for rank in range(self.node.num_nodes) if rank != self.node.node_rank)
        return [rank for rank in others if not self.is_there(rank, MEETS)]

    def host(self) -> str:
        """What the user calls this node's host, else what it calls itself."""
        peers = self.node.peers
        return peers[self.node.node_rank] if self.node.node_rank < len(peers) else self.mine.host

    def name(self, rank: int) -> str:
        """`node 2 (node-c)`: as the user knows it, else as it called itself."""
        host = self.node.peers[rank] if rank < len(self.node.peers) else None
        if host is None and rank == self.node.node_rank:
            host = self.mine.host
        elif host is None and rank in self._heard:
            host = self._heard[rank][0].host
        return f"node {rank} ({host})" if host else f"node {rank}"

    def names(self, ranks: Iterable[int]) -> str:
        return ", ".join(map(self.name, ranks))

    def _go_on(self) -> None:
        while not self._over.wait(BEAT_S):
            # When the store is gone, whoever waits in it meets the same error, and tells of it. A stranger may make one
            # call fail.
            with contextlib.suppress(RuntimeError):
                with self._lock:
                    self._say_word(self.mine)
                self._restore()
                waiting = self._waiting
                if waiting is not None:
                    self.hear()
                    self._tell_wait(waiting)

    def _restore(self) -> None:
        """What is written once, and a stranger can delete."""
        if str(self.node.node_rank).encode() not in self.store.hint("members").split():
            self.store.append("members", f" {self.node.node_rank} ")
        if self._job is not None:
            store, job = self._job
            if store.peek("job") is None:
                store.set("job", job)

    def _say_word(self, word: Word) -> None:
        new = replace(word, count=self.mine.count + 1)
        key = _key(self.node.node_rank)
        found = Word.decode(self.store.compare_set(key, self.mine.encode(), new.encode()))
        is_other = found is not None and found.who != self.mine.who and found.who not in self._replaced
        if found != new and not is_other:  # deleted, or an old one put back
            self.store.set(key, new.encode())
        self.was_ousted = is_other
        self.mine = new

    def _tell_wait(self, waiting: WaitNotice) -> None:
        missing = self.missing()
        if missing:
            where = f"waiting at {self.node.endpoint} for {self.names(missing)}"
            waiting.report(f"{where}, {waiting.waited_s:.0f} s so far")

    def _taken(self, found: bytes) -> PreflightError:
        rank, last, word = self.node.node_rank, self.node.num_nodes - 1, Word.decode(found)
        where = word.host if word else "another host"
        return PreflightError(
            f"NODE_RANK {rank} is taken: the launcher of node {rank} runs on {where} already",
            next_step=f"give each machine a NODE_RANK of its own, from 0 to {last}",
        )


def _key(rank: int) -> str:
    return f"node/{rank}"
