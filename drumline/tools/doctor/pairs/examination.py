"""Starts the doctor on all hosts and checks every pair of them, in bounded time, whatever is closed or
missing.

1. All hosts are started at once, and asked for their facts.
2. Names: what every host's name resolves to on every other.
3. Ports: every host listens, then every host tries every other at the same moment, so closed ports
   cost one limit.
4. Speed: in rounds, so that no host is in two transfers at a time.

A host that has not answered by its limit is absent from then on; what is known about it is kept.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from drumline.base.errors import PreflightError
from drumline.base.text import plural
from drumline.base.untrusted import from_json
from drumline.launch.ssh.client import no_client, ssh_problem
from drumline.launch.ssh.host_connection import HostConnection
from drumline.net.dial import Reason
from drumline.net.frames import Message
from drumline.tools.doctor.finding import JsonObject
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs.node_server import (
    PROTOCOL,
    Introduction,
    ListenRequest,
    OpenPorts,
)
from drumline.tools.doctor.pairs.probe import TOKEN_BYTES, Target
from drumline.tools.doctor.pairs.survey import OPEN, Pair, Survey

HELLO = 0
"""The number of a node's first frame, among those of the requests."""


class NodeLostError(PreflightError):
    """The node has exited, or does not answer any more."""


class NodeRequestError(PreflightError):
    """The node answers, but could not do what was asked."""


class NodeClient:
    """One node, and what it was asked. `python`: what runs it, for messages."""

    def __init__(self, connection: HostConnection, *, python: str = sys.executable) -> None:
        self.connection = connection
        self.python = python
        self.lost: NodeLostError | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def clock_ahead_s(self) -> float:
        """How far the node's clock is ahead of ours; known when it has answered."""
        # Its heartbeats have the time of day.
        return self.connection.clock_ahead_s - (time.time() - time.monotonic())

    async def open(self) -> None:
        """Wait until the node has answered; at once if it has."""
        if HELLO not in self._waiting:
            self._waiting[HELLO] = asyncio.get_running_loop().create_future()
            self.connection.on_frame = self._receive
            try:
                closed = await self.connection.open()
            except OSError as error:
                refusal = no_client(self.connection.words[0], error)
                raise NodeLostError(refusal.what, next_step=refusal.next_step) from error

            closed.add_done_callback(self._closed)

        await self._waiting[HELLO]

    async def ask(self, action: str, limit_s: float, /, **arguments: Any) -> Any:
        """The answer to a request, which is a frame with its number:

        {"kind": "probe", "id": 7, "targets": [...]} and {"kind": "answer", "id": 7, "ok": [...]}

        NodeLostError without an answer in time, NodeRequestError for a refusal."""
        if self.lost is not None:
            raise self.lost

        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.connection.send({**arguments, "kind": action, "id": number})

        try:
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            self.connection.hang_up()
            what = f"it did not answer within {limit_s:g} s (asked for: {action})"
            raise self._lose(what) from None
        finally:
            del self._waiting[number]

    async def close(self, **last: Any) -> None:
        """Ask the node to exit. `last`: sent with that."""
        self.connection.send({**last, "kind": "end"})
        if not self.connection.heard_at:
            self.connection.hang_up()  # nobody reads that it is the end

        await self.connection.close()

    def _receive(self, frame: Mapping[str, Any]) -> None:
        """A frame of the node: its hello, or the answer to a request."""
        if frame["kind"] == "hello":
            if frame["protocol"] != PROTOCOL:
                self._lose("its version of drumline is different")
            elif not self._waiting[HELLO].done():
                self._waiting[HELLO].set_result(None)

            return

        answer = self._waiting.get(frame.get("id", 0))
        if answer is None or answer.done():
            return  # the request has timed out

        if "error" in frame:
            answer.set_exception(NodeRequestError(str(frame["error"])))
        else:
            answer.set_result(frame.get("ok"))

    def _closed(self, closed: asyncio.Task[None]) -> None:
        """The connection has ended: all that wait for an answer get the reason."""
        connection = self.connection
        error = None if closed.cancelled() else closed.exception()
        if error is not None or not connection.words:
            self._lose(str(error or "it disconnected during the check"))
            return

        problem, fix = ssh_problem(
            connection.host.name,
            connection.ssh_code or 0,
            list(connection.stderr) or list(connection.stdout),
            python=self.python,
            cwd=str(Path.cwd()),
            is_stuck=connection.is_stuck,
        )
        self._lose(problem, fix)

    def _lose(self, what: str, next_step: str | None = None) -> NodeLostError:
        """The node is lost, for the first reason: all requests that wait for an answer fail with it."""
        self.lost = self.lost or NodeLostError(what, next_step=next_step)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.lost)

        return self.lost


# For a login and a start of Python on a busy host; with a missing host the whole check takes 15 s
# at most.
START_S = 8.0
ANSWER_S = 6.0
PROBE_S = 12.0
# Folders have 2 s on the host itself; with a slow volume it takes a little longer, and its facts
# are left out.
FACTS_S = 8.0
MEASURE_S = 8.0
# A host with containers may have dozens of bridges; the interfaces of gloo and NCCL come first.
MAX_OTHER_ADDRESSES = 4
DATA_PORTS = 2
# The time for all transfers, for any number of hosts; each is bounded too: below 20 ms TCP has not
# reached its speed.
SPEED_BUDGET_S = 6.0
SHORTEST_S = 0.02
LONGEST_S = 0.15
# A slow link is measured again: on a shared host a single short transfer may be slow by chance.
AGAIN_SHARE = 0.3
AGAIN_TIMES = 2
# Of each host.
Ports = dict[int, OpenPorts]
WORST_FIRST = (Reason.NO_ANSWER, Reason.NO_ROUTE, Reason.REFUSED, Reason.WRONG_HOST, OPEN)
Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedName:
    """The answer to `names`, for each of them."""

    addresses: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class PortResult:
    """The answer to `probe`, for each target."""

    outcome: str
    received: int | None = None
    passes: int | None = None


@dataclass(frozen=True)
class LinkSpeed:
    """The answer to `measure`."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    error: str | None = None


class Coordinator:
    """All hosts of one check."""

    def __init__(
        self,
        survey: Survey,
        clients: Sequence[NodeClient | None],
        settings: HostSettings,
        progress: Progress,
    ) -> None:
        """`clients`: of the hosts of the survey; None for one that is absent."""
        self.survey = survey
        self.settings = settings
        self.progress = progress
        self.clients = {
            number: client for number, client in enumerate(clients) if client is not None
        }

    async def start(self) -> None:
        """Connect to all hosts, and ask them who they are."""
        hosts = plural(len(self.survey.hosts), "host")
        self.progress(f"{hosts}: starting the doctor on each")
        await asyncio.gather(*map(self._start, self.clients))
        self.progress(f"{len(self.survey.present())} of {hosts} answered")

    async def close(self, **last: Any) -> None:
        """`last`: sent to every host with the request to exit."""
        closing = (client.close(**last) for client in self.clients.values())
        await asyncio.gather(*closing, return_exceptions=True)

    async def ask_all(
        self,
        action: str,
        limit_s: float,
        requests: Mapping[int, Message],
        kind: type[T],
    ) -> dict[int, T]:
        """Ask these hosts at once, as far as they are present; returns the answers, which must be
        of this kind. If a host is lost or the request fails, the survey has the reason."""
        answers: dict[int, T] = {}

        async def ask(number: int) -> None:
            """One request; what is wrong with it is in the survey afterwards."""
            try:
                answer = await self.clients[number].ask(action, limit_s, **requests[number])
                answers[number] = from_json(kind, answer)
            except NodeRequestError as error:
                self.survey.hosts[number].errors.append(f"{action}: {error.what}")
            except (NodeLostError, ValueError) as error:
                self._lose(number, error)

        numbers = [number for number in requests if self.survey.hosts[number].absent is None]
        await asyncio.gather(*map(ask, numbers))
        return answers

    async def _start(self, number: int) -> None:
        """Connect to one host, and begin."""
        client = self.clients[number]
        try:
            await client.open()
            answer = await client.ask("begin", ANSWER_S, **asdict(self.settings))
            self._introduce(number, from_json(Introduction, answer))
        except (PreflightError, ValueError) as error:
            self._lose(number, error)

    def _introduce(self, number: int, answer: Introduction) -> None:
        """Write into the survey what a host says of itself."""
        host = self.survey.hosts[number]
        host.interfaces = answer.interfaces
        host.gloo = answer.gloo
        host.nccl = answer.nccl
        host.variables = answer.variables
        host.address = host.address or answer.reached_at
        host.hostname = answer.host

        if not self.survey.by_ssh:  # the user has not named the hosts
            host.name = f"{host.hostname} (node {number})"
            host.called = host.called or host.hostname

    def _lose(self, number: int, error: Exception) -> None:
        """A host is absent from now on, and the survey has the reason."""
        host = self.survey.hosts[number]
        host.absent_fix = f"check what {host.name} is doing, and run the doctor again"
        if isinstance(error, PreflightError):
            host.absent = error.what
            host.absent_fix = error.next_step or host.absent_fix
        else:
            host.absent = f"its answer is not that of the doctor: {error}"


async def examine(hosts: Coordinator) -> None:
    """Fill the survey: facts, names, ports, speed and clocks."""
    survey = hosts.survey
    await hosts.start()

    requests: dict[int, Message] = {number: {} for number in survey.present()}
    asking = hosts.ask_all("facts", FACTS_S, requests, JsonObject)
    facts = asyncio.create_task(asking)
    hosts.progress("every pair: names, then ports")
    await _resolve_names(hosts)
    choose_addresses(survey)
    ports = await _open_ports(hosts)
    await _probe_ports(hosts, ports)

    for number, host_facts in (await facts).items():
        survey.hosts[number].facts = host_facts

    await _measure_speed(hosts, ports)

    for number in survey.present():
        survey.hosts[number].clock_s = hosts.clients[number].clock_ahead_s


# Names and addresses


async def _resolve_names(hosts: Coordinator) -> None:
    """Every host looks up the names of all others."""
    survey = hosts.survey
    present = survey.present()
    request = {"names": [survey.hosts[number].called for number in present]}

    requests = dict.fromkeys(present, request)
    answers = await hosts.ask_all("names", ANSWER_S, requests, dict[str, ResolvedName])

    for source, names in answers.items():
        targets = [number for number in present if number != source]
        for target in targets:
            edge = survey.edge(source, target)
            resolved = names.get(survey.hosts[target].called, ResolvedName())
            edge.addresses = resolved.addresses
            edge.name_error = resolved.error


def choose_addresses(survey: Survey) -> None:
    """What its name resolves to, if the host has that address; otherwise where ssh reached it;
    otherwise its first.

    Without ssh names are not used: the address from which it connected to node 0 is taken."""
    named: dict[int, list[str]] = defaultdict(list)
    for (_, target), edge in survey.edges.items():
        named[target] += (edge.addresses or [])[:1]

    for number in survey.present():
        host = survey.hosts[number]
        if not survey.by_ssh and host.interface_of(host.address) is not None:
            continue

        nccl = host.nccl["address"] if host.nccl else None
        reachable = host.reachable_addresses()
        candidates = (*named[number], host.address, nccl, *reachable)
        host.address = next((address for address in candidates if address in reachable), None)


def other_addresses(survey: Survey, number: int) -> list[str]:
    """Further addresses to listen on: a library may choose one, or only one of them may work."""
    host = survey.hosts[number]
    chosen = [interface["address"] for interface in (host.gloo, host.nccl) if interface]
    ranked = sorted(host.reachable_addresses(), key=lambda address: address not in chosen)

    return [address for address in ranked if address != host.address][:MAX_OTHER_ADDRESSES]


# Ports


async def _open_ports(hosts: Coordinator) -> Ports:
    """Every host listens; returns the ports that each opened."""
    survey = hosts.survey
    token = secrets.token_hex(TOKEN_BYTES)

    requests: dict[int, Message] = {}
    for number in survey.present():
        has_rendezvous = number == 0 and survey.by_ssh
        request = ListenRequest(
            token,
            number,
            survey.hosts[number].address or "none",
            DATA_PORTS,
            other_addresses(survey, number),
            survey.rendezvous_port if has_rendezvous else None,
        )
        requests[number] = asdict(request)

    ports = await hosts.ask_all("listen", ANSWER_S, requests, OpenPorts)
    for number, opened in ports.items():
        survey.hosts[number].rendezvous_error = opened.rendezvous_error

    return ports


async def _probe_ports(hosts: Coordinator, ports: Ports) -> None:
    """Every host tries the ports of all others at the same moment.

    Of the two data ports the worse outcome counts: a firewall may let some ports through.
    """
    plans = {}
    requests: dict[int, Message] = {}
    for number in ports:
        plans[number] = list(targets_of(hosts.survey, number, ports))
        requests[number] = {"targets": [asdict(target) for _, target in plans[number]]}

    answers = await hosts.ask_all("probe", PROBE_S, requests, list[PortResult])

    for source, results in answers.items():
        for (kind, target), result in zip(plans[source], results, strict=False):
            edge = hosts.survey.edge(source, target.node)
            if kind == "rendezvous":
                edge.rendezvous = result.outcome
            elif kind == "data":
                edge.data = min(edge.data or OPEN, result.outcome, key=WORST_FIRST.index)
                if target.large:
                    edge.received = result.received
                    edge.passes = result.passes
            else:
                edge.others = {**(edge.others or {}), kind: result.outcome}


def targets_of(survey: Survey, source: int, ports: Ports) -> Iterator[tuple[str, Target]]:
    """What one host tries: for each port its kind (`data`, `rendezvous`, or an address) and the
    target.

    ('data', Target(node=1, address='10.0.0.5', port=41001, large=True))
    ('172.17.0.1', Target(node=1, address='172.17.0.1', port=41003))
    """
    for number, opened in ports.items():
        if number == source:
            continue

        address = survey.hosts[number].address or "none"
        for place, port in enumerate(opened.data):
            yield "data", Target(number, address, port, large=place == 0)

        for other_address, port in opened.other_ports.items():
            yield other_address, Target(number, other_address, port)

        if opened.rendezvous_port is not None:
            # At the address that the name resolves to there, as for a rank.
            named = survey.edge(source, number).addresses or [address]
            yield "rendezvous", Target(number, named[0], opened.rendezvous_port)


# Speed


async def _measure_speed(hosts: Coordinator, ports: Ports) -> None:
    """All open links once, and those that are slow again."""
    survey = hosts.survey
    open_links = survey.links(lambda edge: edge.data == OPEN and not edge.has_hole)
    links = open_links.keys() & set(survey.pairs())
    begun = time.monotonic()
    await _measure_in_rounds(hosts, ports, links, "speed")

    for _ in range(AGAIN_TIMES):
        # Links so slow that they took all the time are not measured again.
        if time.monotonic() - begun > SPEED_BUDGET_S:
            return

        limit = AGAIN_SHARE * survey.usual_speed()
        speeds = {pair: survey.edges[pair].bytes_per_s or 0.0 for pair in links}
        slow = {pair for pair in links if 0 < speeds[pair] < limit}
        await _measure_in_rounds(hosts, ports, slow, "slow links again")


async def _measure_in_rounds(
    hosts: Coordinator,
    ports: Ports,
    links: Collection[Pair],
    title: str,
) -> None:
    """Measure these links, so that no host is in two transfers at a time. `title`: for the progress."""
    survey = hosts.survey
    planned = rounds(len(survey.hosts), links)
    equal_s = SPEED_BUDGET_S / (2 * len(planned) or 1)
    seconds = min(LONGEST_S, max(SHORTEST_S, equal_s))

    async def measure(source: int, target: int) -> None:
        """One link in one direction; of several measurements the best counts."""
        receiver = survey.hosts[target]
        place = Target(target, receiver.address or "none", ports[target].data[0])
        request = {"target": asdict(place), "seconds": seconds}
        if receiver.absent is not None:
            return

        answers = await hosts.ask_all("measure", MEASURE_S, {source: request}, LinkSpeed)
        for speed in answers.values():
            edge = survey.edge(source, target)
            edge.error = speed.error
            # The best measurement: nothing makes a link look faster than it is.
            if speed.bytes_per_s is not None:
                edge.bytes_per_s = max(edge.bytes_per_s or 0.0, speed.bytes_per_s)
                edge.latency_s = min(edge.latency_s or speed.latency_s, speed.latency_s)

    async def measure_both_ways(pair: Pair) -> None:
        """Both directions of a pair, as far as they are measured in this round."""
        for way in (pair, pair[::-1]):  # one after the other: they share the line
            if way in links:
                await measure(*way)

    for number, pairs in enumerate(planned, start=1):
        hosts.progress(f"{title}: round {number} of {len(planned)}")
        await asyncio.gather(*map(measure_both_ways, pairs))


def rounds(count: int, links: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs of these links, in rounds in which each of `count` hosts is in one pair at most: of four
    hosts (0, 3) and (1, 2), then (0, 2) and (1, 3), then (0, 1) and (2, 3).

    Two transfers at once on one host would halve each other. All pairs take `count` - 1 rounds
    (`count` when it is odd), which is the fewest possible."""
    linked = {(min(link), max(link)) for link in links}
    # The circle method: one host stays, the others move on by one place each round; opposite places
    # are pairs.
    seats = list(range(count + count % 2))
    planned = []
    for _ in range(len(seats) - 1):
        half = seats[: len(seats) // 2]
        facing = zip(half, reversed(seats), strict=False)
        pairs = ((min(ends), max(ends)) for ends in facing)
        planned.append([pair for pair in pairs if pair in linked])
        seats.insert(1, seats.pop())

    return [pairs for pairs in planned if pairs]
