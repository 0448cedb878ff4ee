"""The rendezvous of nodes: torchrun's c10d rendezvous, with the node ranks that the user gave.

c10d numbers nodes by the order of their addresses. A user who sets NODE_RANK on each machine
expects rank 0, which prints and saves, on node 0: so when all have joined, each publishes its rank,
and that number is used. c10d also continues with fewer nodes, and waits, without a message; here
both are reported.
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

from drumline.base.errors import DrumlineError, ExitCode, HangError, PreflightError, TrainingError
from drumline.base.job_secret import SECRET_ENV, derived, new_secret
from drumline.base.terminal import print_message
from drumline.launch.node.c10d_rendezvous import C10dRendezvous
from drumline.launch.node.data_ports import (
    NodeCard,
    check_data_ports,
    first_node,
    open_probe_port,
    unreachable_nodes,
)
from drumline.launch.node.membership import DONE, JOINING, RUNNING, Membership
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import WaitNotice
from drumline.net.handshake import nonce
from drumline.net.interfaces import own_binding
from drumline.net.key_exchange import KeyPair
from drumline.rank.sealed_store import SealedStore, document

POLL_S = 0.05
LINGER_S = 5.0
FIRST_NOTICE_S = 15.0
# What a node publishes about itself; if it does not listen for probes, there is no port.
CARD: dict[str, type] = {
    **dict.fromkeys(
        ("rank", "port", "watch_port", "restarts", "counted_step", "reached_step"), int
    ),
    **dict.fromkeys(("address", "host", "public", "nonce"), str),
}


class NodeRendezvous(RendezvousHandler):
    """c10d's rendezvous, with nodes in the order of their NODE_RANK."""

    def __init__(
        self, inner: C10dRendezvous, node: NodePlan, address: str, membership: Membership
    ) -> None:
        self.inner = inner
        self.node = node
        self.address = address
        self.membership = membership
        self.secret = membership.secret
        self.members: dict[int, int] = {}
        """The node rank of each participant of this round, by c10d's number."""
        self._ask = WaitNotice(first_s=1, growth=1)
        self._wait = WaitNotice()
        self.restart_reason = ""
        """Why this node's ranks are restarted although they run."""
        self.is_done = False
        """Whether all ranks here have exited with 0, while others still run."""
        self.is_leaving = False
        """Whether this node's ranks were asked to stop: then nodes that join or leave do not
        matter."""
        self.has_lost_node = False
        """Whether ranks are restarted because a node is lost."""
        self.ranks_secret = ""
        """The secret of the ranks and sidecars of this round, on all nodes."""
        self.sidecars: tuple[str, ...] = ()
        """`ADDRESS:PORT` of each node's sidecar, in the order of the ranks of this round."""
        self.restarts_used = node.restarts_used
        """How often the job was restarted after a failure on any node, without getting further than
        `counted_step`."""
        self.counted_step = node.reached_step
        """The furthest step of all nodes when they joined."""
        self.reached_step = node.reached_step
        """The furthest step of this node's ranks."""

    def get_backend(self) -> str:
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Never: rank 0 opens a store for each attempt, so that values of an earlier one are not
        found."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self.is_done = False
        with self.explained():
            with self.membership.joining():
                info = self._join()
            self.membership.read()
        if self.missing:
            print_message(f"warning: training continues on {self._nodes_left()}")
        return info

    def _join(self) -> RendezvousInfo:
        """Collective: every participant publishes its card (rank, address, ports), and reads all
        others'."""
        cards = results = None
        while cards is None or results is None:
            info = self.inner.next_rendezvous()
            # With the round: values recorded in an earlier one are not valid.
            store = SealedStore(info.store, self.secret, f"drumline/nodes/{self.inner.round}")
            keys = KeyPair() if self.secret is None else None
            with open_probe_port(own_binding(self.address)) as probe:
                cards = self._cards(
                    store, info, {**probe, "public": keys.public if keys else "", "nonce": nonce()}
                )
                if cards:
                    result = self._result(cards, info.rank, keys)
                    results = self._exchange(store, info, "result", result, closed=dict)
        self._check_data_ports(store, cards, [published["closed"] for published in results])
        self.members = {number: card["rank"] for number, card in enumerate(cards)}
        # Missing nodes leave no gap: torchrun counts from 0.
        in_order = sorted(cards, key=lambda card: int(card["rank"]))
        node_rank = [card["rank"] for card in in_order].index(self.node.node_rank)
        self.ranks_secret = self._ranks_secret(cards, results, info.rank, keys)
        self.sidecars = tuple(f"{card['address']}:{card['watch_port']}" for card in in_order)
        self._count_restarts(cards)
        agents: Any = SealedStore(
            info.store, derived(self.ranks_secret, "agents"), "drumline/agents"
        )
        place = RendezvousStoreInfo(in_order[0]["address"], in_order[0]["port"])
        return RendezvousInfo(agents, node_rank, info.world_size, place)

    def _result(
        self, cards: Sequence[NodeCard], number: int, keys: KeyPair | None
    ) -> dict[str, Any]:
        """What this node publishes after it has read the cards."""
        result: dict[str, Any] = {"closed": unreachable_nodes(cards, number)}
        if keys and number == first_node(cards):
            # Without a common secret the first node makes one, and encrypts it for each of the
            # others.
            self.ranks_secret = new_secret()
            result["secrets"] = [
                keys.wrap(self.ranks_secret, card["public"], card["nonce"]) for card in cards
            ]
        return result

    def _count_restarts(self, cards: Sequence[NodeCard]) -> None:
        """The same on all nodes. A restart after progress is the first at its step."""
        counted_step = max(card["counted_step"] for card in cards)
        reached_step = max(card["reached_step"] for card in cards)
        restarts = max(card["restarts"] for card in cards)
        self.restarts_used = min(restarts, 1) if reached_step > counted_step else restarts
        self.counted_step = max(counted_step, reached_step)
        self.reached_step = self.counted_step

    def _ranks_secret(
        self,
        cards: Sequence[NodeCard],
        results: Sequence[NodeCard],
        number: int,
        keys: KeyPair | None,
    ) -> str:
        if keys is None:
            assert self.secret is not None
            return derived(self.secret, "ranks", *(card["nonce"] for card in cards))
        first = first_node(cards)
        if number == first:
            return self.ranks_secret
        wrapped = results[first].get("secrets")
        if not isinstance(wrapped, list) or len(wrapped) != len(cards):
            raise self._forged()
        secret = keys.wrap(str(wrapped[number]), cards[first]["public"], cards[number]["nonce"])
        if secret is None:
            raise self._forged()
        return secret

    def _forged(self) -> PreflightError:
        return PreflightError(
            f"a node at {self.node.endpoint} wrote a value that no launcher of this version writes",
            next_step=f"install the same version on all nodes, and set {SECRET_ENV} to one value on all",
        )

    def _cards(
        self, store: SealedStore, info: RendezvousInfo, card_fields: Mapping[str, Any]
    ) -> list[dict[str, Any]] | None:
        """The cards of all participants; None when one is lost, or two have the same number."""
        card = {
            "rank": self.node.node_rank,
            "host": self.membership.host(self.node.node_rank),
            "address": self.address,
            "port": _free_port(),
            **card_fields,
            "watch_port": _free_port(),
            "restarts": self.restarts_used,
            "counted_step": self.counted_step,
            "reached_step": self.reached_step,
        }
        cards = self._exchange(store, info, "card", card, **CARD)
        # After a network cut two groups may have joined separately, with the same numbers.
        return cards if cards and card in cards else None

    def _exchange(
        self, store: SealedStore, info: RendezvousInfo, kind: str, content: Any, **fields: type
    ) -> list[dict[str, Any]] | None:
        """Collective: the values of all, by c10d's numbers; None if one is lost before it wrote:
        then all rejoin."""
        store.set(f"{kind}/{info.rank}", json.dumps(content))
        keys = [f"{kind}/{number}" for number in range(info.world_size)]
        while (texts := store.peek_all(keys)) is None:
            if self._lost(range(info.world_size)):
                return None
            time.sleep(POLL_S)
        values = []
        for text in texts:
            value = document(text, **fields)
            if value is None:
                raise self._forged()
            values.append(value)
        return values

    def _check_data_ports(
        self, store: SealedStore, cards: Sequence[NodeCard], closed: Sequence[Any]
    ) -> None:
        try:
            check_data_ports(cards, closed)
        except PreflightError as error:
            # All nodes find the same, if the first does not close the store before.
            until = time.monotonic() + LINGER_S
            is_first = self.node.node_rank == 0
            while (
                store.add("closed/known", int(not is_first)) < len(cards) - 1
                and is_first
                and time.monotonic() < until
            ):
                time.sleep(POLL_S)
            raise self._error(error.what, error.next_step) from error

    def _lost(self, numbers: Iterable[int]) -> list[int]:
        """Participants that c10d counts as lost, as of its last poll."""
        self.inner.num_nodes_waiting()  # asks the store, though not more than once a second
        here = self.inner._state_holder.state.participants.values()
        return [number for number in numbers if number not in here]

    @property
    def missing(self) -> list[int]:
        """Nodes that the job continues without."""
        present = self.members.values()
        return (
            [rank for rank in range(self.node.num_nodes) if rank not in present] if present else []
        )

    def warn_of_missing_nodes(self) -> None:
        """At the end, warn if the job ended with fewer nodes."""
        if self.missing:
            print_message(f"warning: the job ended on {self._nodes_left()}")

    def _nodes_left(self) -> str:
        left = self.node.num_nodes - len(self.missing)
        all_nodes = self.node.num_nodes
        return f"{left} of {all_nodes} nodes, without {self.membership.names(self.missing)}"

    def num_nodes_waiting(self) -> int:
        """Also not 0 when a node is lost: otherwise the ranks would wait for its ranks in the next
        collective."""
        if self.is_leaving:
            return 0
        if self.is_done:
            again = [rank for rank in self._other_nodes if self.membership.is_alive(rank, JOINING)]
            self.restart_reason = f"{self.membership.names(again)} restarted"
            return len(again)
        with self.explained():
            if self._ask.is_due() and (failure := self.membership.failure()):
                self.membership.set_state(DONE)
                raise self._error(failure, "read its output")
            if self.membership.was_replaced:
                raise self._error(
                    f"another launcher has taken NODE_RANK {self.node.node_rank} from this one"
                )
            waiting = self.inner.num_nodes_waiting()
            lost = [self.members[number] for number in self._lost(self.members)]
            if lost and self.node.max_restarts == 0 and not self.node.may_shrink:
                raise self._error(
                    f"{self._reason(lost)}, and no restart is left",
                    "check what ended it, and start all nodes again",
                )
            if waiting or lost:
                self.restart_reason = self._reason(lost)
                self.has_lost_node = bool(lost)
        return waiting + len(lost)

    def _reason(self, lost: list[int]) -> str:
        self.membership.read()
        joining = [
            rank for rank in range(self.node.num_nodes) if self.membership.is_alive(rank, JOINING)
        ]
        if new := [rank for rank in joining if rank in self.missing]:
            return f"{self.membership.names(new)} joined"
        if lost_for_good := [rank for rank in lost if rank not in joining]:
            return f"{self.membership.names(lost_for_good)} {'is' if len(lost_for_good) == 1 else 'are'} lost"
        return (
            f"{self.membership.names(joining)} restarted" if joining else "another node restarted"
        )

    def are_others_running(self) -> bool:
        """When all ranks here have exited with 0: whether ranks of another node still run, and may
        restart all."""
        if self.is_leaving:
            return False
        with contextlib.suppress(RendezvousError, dist.DistError):
            if not self.is_done:
                self.is_done = True
                self._wait = WaitNotice(first_s=FIRST_NOTICE_S)
                self.membership.set_state(DONE)
            if running := self._running_nodes():
                self._report_wait(self._wait, running)
                return True
        return False

    def _report_wait(self, notice: WaitNotice, running: list[int]) -> None:
        if notice.is_due():
            print_message(
                f"the ranks here are done; waiting for those of {self.membership.names(running)}"
            )

    def wait_for_others(self) -> None:
        """Collective: ranks exit at different times, and the first node must not close the store
        too soon."""
        notice = WaitNotice(first_s=FIRST_NOTICE_S)
        with contextlib.suppress(RendezvousError, dist.DistError):
            self.membership.set_state(DONE)
            self.inner.set_closed()  # a node that joins now is too late, and is informed
            while running := self._running_nodes():
                self._report_wait(notice, running)
                time.sleep(POLL_S)

    def publish_failure(self, what: str, code: int = ExitCode.TRAINING_FAILED) -> None:
        """This node ends the job: publish why, before the store is closed."""
        until = time.monotonic() + LINGER_S
        with contextlib.suppress(RendezvousError, dist.DistError):
            self.membership.publish_failure(what, code)
            while self.node.node_rank == 0 and self._running_nodes() and time.monotonic() < until:
                time.sleep(POLL_S)

    def _running_nodes(self) -> list[int]:
        self.membership.read()
        limit_s = self.node.silence_s
        return [
            rank
            for rank in self._other_nodes
            if self.membership.is_alive(rank, RUNNING, JOINING, within_s=limit_s)
        ]

    @property
    def _other_nodes(self) -> list[int]:
        return [rank for rank in self.members.values() if rank != self.node.node_rank]

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns errors between nodes into messages that name the node."""
        node = self.node
        where = self.node.endpoint
        try:
            yield
        except RendezvousTimeoutError as error:
            late = self.membership.names(self.membership.missing()) or "the others"
            raise self._error(
                f"node {node.node_rank} waited {node.join_timeout_s} s at {where}: {late} did not join",
                "start it there, with the same settings and its own NODE_RANK; check that it reaches that port",
            ) from error
        except RendezvousClosedError as error:
            ended = (
                "another node ended the job"
                if self.members
                else "the job is over, or another node ended it"
            )
            what = f"{ended}; node {node.node_rank} cannot join it"
            with contextlib.suppress(dist.DistError):
                what = self.membership.failure() or what
            raise self._error(what, "read the output of the others") from error
        except (RendezvousError, dist.DistError) as error:
            raise self._error(
                f"the first node, {self.membership.name(0)}, is lost or unreachable: nothing answers at {where}",
                "check what ended it; start all nodes again: a task resumes from its newest checkpoint",
            ) from error

    def _error(self, what: str, next_step: str | None = None) -> DrumlineError:
        kind: type[DrumlineError] = TrainingError if self.members else PreflightError
        with contextlib.suppress(dist.DistError):
            kind = HangError if self.membership.failure_code() == ExitCode.HANG else kind
        return kind(what, next_step=next_step)

    def leave(self) -> None:
        """Leave without closing the rendezvous. A thread that still uses the store would abort
        Python's exit."""
        self.membership.leave()

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        with contextlib.suppress(dist.DistError):
            self.membership.set_state(DONE)
        self.membership.leave()
        return self.inner.shutdown()


def _free_port() -> int:
    return int(get_free_port())  # type: ignore[no-untyped-call]
