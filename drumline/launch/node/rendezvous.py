"""Where the nodes of a job meet: torchrun's c10d rendezvous, with the node ranks that the user gave.

c10d numbers nodes by the order of their addresses. A person who wrote NODE_RANK into a file per machine expects rank 0,
which prints and saves, on the node with 0: so once all have met, each says who it is, and that number counts. c10d also
goes on with fewer nodes without a word, and waits in silence; here both are told.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.utils.distributed import get_free_port

from drumline.errors import DrumlineError, ExitCode, HangError, PreflightError, TrainingError
from drumline.launch.node.edges import Claim, check_edges, closed_edges, open_door
from drumline.launch.node.node_heartbeats import QuickHandler
from drumline.launch.node.roll import DONE, MEETS, WORKS, Roll
from drumline.launch.node.sealed_store import SealedStore, document
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import WaitNotice
from drumline.net.handshake import nonce
from drumline.net.interfaces import own_binding
from drumline.net.secrets import VARIABLE, KeyPair, derived, new_secret
from drumline.terminal import print_message

POLL_S = 0.05
LINGER_S = 5.0
PART_FIRST_WORD_S = 15.0
# What a node says of itself; where it has opened no door, it names none.
CLAIM: dict[str, type] = {
    **dict.fromkeys(("rank", "port", "watch_port", "restarts"), int),
    **dict.fromkeys(("address", "host", "public", "nonce"), str),
}


class FixedRanks(RendezvousHandler):
    """The rendezvous below, in which nodes keep the order of the ranks they were given."""

    def __init__(
        self,
        inner: QuickHandler,
        node: NodePlan,
        address: str,
        roll: Roll,
    ) -> None:
        self.inner = inner
        self.secret = roll.secret
        self.node = node
        self.address = address
        self.roll = roll
        self.members: dict[int, int] = {}
        """The node rank of each participant of this round, by c10d's number."""
        self._ask = WaitNotice(first_s=1, growth=1)
        self._wait = WaitNotice()
        self.why_again = ""
        """Why this node's ranks are started again although they run."""
        self.is_done = False
        """Whether all ranks here have exited with 0, while others still work."""
        self.is_leaving = False
        """Whether this node's ranks were told to leave: whoever else comes or goes does not matter any more."""
        self.has_lost = False
        """Whether that is because a node is gone, and its ranks with it."""
        self.ranks_secret = ""
        """What the ranks and sidecars of this round know each other by, on all nodes; another for each round."""
        self.sidecars: tuple[str, ...] = ()
        """`ADDRESS:PORT` of each node's sidecar, in the order of the ranks of this round."""
        self.restarts_used = 0
        """How often the job was started again after a failure, wherever that was: each node counts with all others."""

    def get_backend(self) -> str:
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Never: rank 0 opens a store for each attempt, so that none finds what an earlier one left there."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self.is_done = False
        with self.explained():
            with self.roll.meeting():
                info = self._meet()
            self.roll.hear()
        if self.missing:
            it = "it" if len(self.missing) == 1 else "them"
            print_message(f"WARNING: {self._who_is_missing('is', 'are')}; training goes on without {it}")
        return info

    def _meet(self) -> RendezvousInfo:
        """Collective: every participant says its rank and where ranks could meet, and hears all others'."""
        claims = edges = None
        while claims is None or edges is None:
            info = self.inner.next_rendezvous()
            # With the round: what was recorded of an earlier one does not fit.
            store = SealedStore(info.store, self.secret, f"drumline/nodes/{self.inner.round}")
            keys = KeyPair() if self.secret is None else None
            with open_door(own_binding(self.address)) as door:
                claims = self._claims(
                    store, info, {**door, "public": keys.public if keys else "", "nonce": nonce()}
                )
                if claims:
                    edge = {
                        "closed": closed_edges(claims, info.rank),
                        **self._secrets(claims, info.rank, keys),
                    }
                    edges = self._exchange(store, info, "edges", edge, closed=dict)
        self._check_edges(store, claims, [edge["closed"] for edge in edges])
        self.members = {number: claim["rank"] for number, claim in enumerate(claims)}
        # Nodes that are missing leave no gap: torchrun counts them from 0 up.
        in_order = sorted(claims, key=lambda claim: int(claim["rank"]))
        node_rank = [claim["rank"] for claim in in_order].index(self.node.node_rank)
        place = RendezvousStoreInfo(in_order[0]["address"], in_order[0]["port"])
        self.ranks_secret = self._ranks_secret(claims, edges, info.rank, keys)
        self.sidecars = tuple(f"{claim['address']}:{claim['watch_port']}" for claim in in_order)
        self.restarts_used = max(claim["restarts"] for claim in claims)
        agents: Any = SealedStore(info.store, derived(self.ranks_secret, "agents"), "drumline/agents")
        return RendezvousInfo(agents, node_rank, info.world_size, place)

    def _secrets(self, claims: Sequence[Claim], number: int, keys: KeyPair | None) -> dict[str, Any]:
        """Where nodes were given no secret: the first makes one, and wraps it for each of the others."""
        if keys is None or number != _first(claims):
            return {}
        self.ranks_secret = new_secret()
        return {
            "secrets": [keys.wrap(self.ranks_secret, claim["public"], claim["nonce"]) for claim in claims]
        }

    def _ranks_secret(
        self, claims: Sequence[Claim], edges: Sequence[Mapping[str, Any]], number: int, keys: KeyPair | None
    ) -> str:
        if keys is None:
            assert self.secret is not None
            return derived(self.secret, "ranks", *(claim["nonce"] for claim in claims))
        if number == _first(claims):
            return self.ranks_secret
        wrapped = edges[_first(claims)].get("secrets")
        mine = wrapped[number] if isinstance(wrapped, list) and len(wrapped) == len(claims) else None
        secret = keys.wrap(str(mine), claims[_first(claims)]["public"], claims[number]["nonce"])
        if secret is None:
            raise self._forged()
        return secret

    def _forged(self) -> PreflightError:
        return PreflightError(
            f"a node at {self.node.endpoint} did not write what a launcher writes: another version, or a stranger",
            next_step=f"install the same version on all nodes, and set {VARIABLE} to one value on all",
        )

    def _claims(
        self, store: SealedStore, info: RendezvousInfo, door: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """What each participant says of itself; None as below, or when another has spoken in this node's place."""
        mine = {"rank": self.node.node_rank, "address": self.address, "port": _free_port(), **door}
        mine |= {"watch_port": _free_port(), "restarts": self.restarts_used, "host": self.roll.host()}
        claims = self._exchange(store, info, "claim", mine, **CLAIM)
        # After a cut two sides may have met apart, under the same numbers.
        return claims if claims and mine in claims else None

    def _exchange(
        self, store: SealedStore, info: RendezvousInfo, kind: str, mine: Any, **fields: type
    ) -> list[dict[str, Any]] | None:
        """Collective: what all say, by c10d's numbers; None when one is gone before it has: all meet again then."""
        store.set(f"{kind}/{info.rank}", json.dumps(mine))
        keys = [f"{kind}/{number}" for number in range(info.world_size)]
        while (texts := store.peek_all(keys)) is None:
            if self._gone(range(info.world_size)):
                return None
            time.sleep(POLL_S)
        said = [document(text, **fields) for text in texts]
        if None in said:
            raise self._forged()
        return [one for one in said if one is not None]

    def _check_edges(self, store: SealedStore, claims: Sequence[Claim], edges: Sequence[Any]) -> None:
        try:
            check_edges(claims, edges)
        except PreflightError as error:
            # All nodes find the same, if the first does not take the store away before.
            notice = WaitNotice(first_s=LINGER_S)
            is_first = self.node.node_rank == 0
            while store.add("edges/known", int(not is_first)) < len(claims) - 1 and is_first:
                if notice.is_due():
                    break
                time.sleep(POLL_S)
            raise self._error(error.what, error.next_step) from error

    def _gone(self, numbers: Iterable[int]) -> list[int]:
        """Participants that c10d has not heard of for long enough, as of the last question to it."""
        self.inner.num_nodes_waiting()  # asks the store, though not more than once a second
        here = self.inner._state_holder.state.participants.values()
        return [number for number in numbers if number not in here]

    @property
    def missing(self) -> list[int]:
        """Nodes that the job goes on without."""
        present = self.members.values()
        return [rank for rank in range(self.node.num_nodes) if rank not in present] if present else []

    def remind(self) -> None:
        """At the end: what was trained on fewer nodes should not look like the rest."""
        if self.missing:
            print_message(f"WARNING: this ended with {self._who_is_missing('was', 'were')}")

    def _who_is_missing(self, one: str, several: str) -> str:
        missing = self.missing
        here = self.node.num_nodes - len(missing)
        verb = one if len(missing) == 1 else several
        return f"{here} of {self.node.num_nodes} nodes: {self.roll.names(missing)} {verb} missing"

    def num_nodes_waiting(self) -> int:
        """Not 0 also when a node is gone: its ranks would be waited for in the next collective, and long."""
        if self.is_leaving:
            return 0
        if self.is_done:
            again = [rank for rank in self._others if self.roll.is_there(rank, MEETS)]
            self.why_again = f"{self.roll.names(again)} did so"
            return len(again)
        with self.explained():
            if self._ask.is_due() and (failure := self.roll.failure()):
                self.roll.now(DONE)
                raise self._error(failure, "see what it said")
            if self.roll.was_ousted:
                raise self._error(f"another launcher has taken NODE_RANK {self.node.node_rank} from this one")
            waiting = self.inner.num_nodes_waiting()
            gone = [self.members[number] for number in self._gone(self.members)]
            if gone and self.node.max_restarts == 0 and not self.node.may_shrink:
                raise self._error(
                    f"{self._reason(gone)}, and no restart is left",
                    "see what ended it, and start all nodes again",
                )
            if waiting or gone:
                self.why_again, self.has_lost = self._reason(gone), bool(gone)
        return waiting + len(gone)

    def _reason(self, gone: list[int]) -> str:
        self.roll.hear()
        come = [rank for rank in range(self.node.num_nodes) if self.roll.is_there(rank, MEETS)]
        if new := [rank for rank in come if rank in self.missing]:
            return f"{self.roll.names(new)} came"
        if lost := [rank for rank in gone if rank not in come]:
            return f"{self.roll.names(lost)} {'is' if len(lost) == 1 else 'are'} gone"
        return f"{self.roll.names(come)} did so" if come else "another node did so"

    def may_be_needed(self) -> bool:
        """When all ranks here have exited with 0: whether those of another node still work. One that exited too early
        makes them fail; they are restarted then, and this node's ranks with them."""
        if self.is_leaving:
            return False
        with contextlib.suppress(RendezvousError, dist.DistError):
            if not self.is_done:
                self.is_done, self._wait = True, WaitNotice(first_s=PART_FIRST_WORD_S)
                self.roll.now(DONE)
            if others := self._others_at_work():
                self._report_wait(self._wait, others)
                return True
        return False

    def _report_wait(self, notice: WaitNotice, others: list[int]) -> None:
        if notice.is_due():
            print_message(f"the ranks here are done; waiting for those of {self.roll.names(others)}")

    def wait_for_the_end(self) -> None:
        """Collective: ranks end at different times, and the first node must not take the store away too soon."""
        notice = WaitNotice(first_s=PART_FIRST_WORD_S)
        with contextlib.suppress(RendezvousError, dist.DistError):
            self.roll.now(DONE)
            self.inner.set_closed()  # who comes now comes too late, and is told so
            while others := self._others_at_work():
                self._report_wait(notice, others)
                time.sleep(POLL_S)

    def tell_failure(self, what: str, code: int = ExitCode.TRAINING_FAILED) -> None:
        """This node gives up, and the job with it: let the others know why, before the store is gone."""
        notice = WaitNotice(first_s=LINGER_S)
        with contextlib.suppress(RendezvousError, dist.DistError):
            self.roll.tell_failure(what, code)
            while self.node.node_rank == 0 and self._others_at_work() and not notice.is_due():
                time.sleep(POLL_S)

    def _others_at_work(self) -> list[int]:
        self.roll.hear()
        limit_s = self.node.lost_after_s
        return [rank for rank in self._others if self.roll.is_there(rank, WORKS, MEETS, within_s=limit_s)]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.members.values() if rank != self.node.node_rank]

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong between nodes, in a sentence that names the node."""
        node, where = self.node, self.node.endpoint
        try:
            yield
        except RendezvousTimeoutError as error:
            late = self.roll.names(self.roll.missing()) or "the others"
            raise self._error(
                f"node {node.node_rank} waited {node.join_timeout_s} s at {where}: {late} did not come",
                "start it there, with the same settings and a NODE_RANK of its own; see that it reaches that port",
            ) from error
        except RendezvousClosedError as error:
            raise self._error(self._why_closed(), "see what the others said") from error
        except (RendezvousError, dist.DistError) as error:
            raise self._error(
                f"the first node, {self.roll.name(0)}, is gone, or the way to it: nothing answers at {where}, "
                "where the nodes meet",
                "see what ended it; start all nodes again: a task goes on from its newest checkpoint",
            ) from error

    def _why_closed(self) -> str:
        with contextlib.suppress(dist.DistError):
            if failure := self.roll.failure():
                return failure
        what = "another node ended the job" if self.members else "the job is over, or another node ended it"
        return f"{what}; node {self.node.node_rank} cannot join it"

    def _error(self, what: str, next_step: str | None = None) -> DrumlineError:
        kind: type[DrumlineError] = TrainingError if self.members else PreflightError
        with contextlib.suppress(dist.DistError):
            kind = HangError if self.roll.failure_code() == ExitCode.HANG else kind
        return kind(what, next_step=next_step)

    def sign_out(self) -> None:
        """Leave the rendezvous open for this node's return; a thread in the store as Python ends would abort it."""
        self.roll.sign_out()

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        with contextlib.suppress(dist.DistError):
            self.roll.now(DONE)
        self.roll.sign_out()
        return self.inner.shutdown()


def _first(claims: Sequence[Claim]) -> int:
    """c10d's number of the node with the smallest rank."""
    return min(range(len(claims)), key=lambda number: int(claims[number]["rank"]))


def _free_port() -> int:
    port: int = get_free_port()  # type: ignore[no-untyped-call]
    return port
