"""Leads an examination: every host at once, then every pair, in a time that is bounded whatever is closed or missing.

1. Welcome: all hosts are started at once. Who has not said a word by the limit is absent, and left out from then on.
2. Names: what every host's name leads to on every other.
3. Ports: everybody listens, then everybody tries everybody at the same moment, so that closed ones cost one limit.
4. Speed: in rounds, so that no host is in two transfers at a time.

A node that ends on the way is absent from there; what is known about it stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.doctor.pairs.addresses import DATA_PORTS, choose_addresses, other_addresses, targets_of
from drumline.doctor.pairs.channel import Channel, NodeError, NodeGoneError
from drumline.doctor.pairs.judge_speed import usual_speed
from drumline.doctor.pairs.listeners import TOKEN_BYTES
from drumline.doctor.pairs.probe import Outcome
from drumline.doctor.pairs.rounds import Pair, rounds_of
from drumline.doctor.pairs.survey import HostSeen, Survey
from drumline.launch.ssh.client import SshProblem, known_problem, last_line
from drumline.net.frames import WRONG_FIELD, FrameError, Message, read_field, read_list

Opener = Callable[[], Awaitable[Channel]]
Progress = Callable[[str], None]

# A login and a start of Python, on a busy host; the whole answer has 15 s when a host is missing.
WELCOME_S = 8.0
ANSWER_S = 6.0
PROBE_S = 12.0
# Folders get 2 s on the host itself; a slow volume gets some more, and then the rest is told without.
FACTS_S = 8.0
MEASURE_S = 8.0
CLOCK_READS = 4
MOST_INTERFACES = 4096
STAY_EVERY_S = 8.0
# All transfers together, whatever the number of hosts; each is bounded too: below 20 ms TCP is still warming up.
SPEED_BUDGET_S = 6.0
SHORTEST_S, LONGEST_S = 0.02, 0.15
# Measured again before it is called slow: on a shared host a single short transfer may just have been unlucky.
AGAIN_SHARE = 0.3
AGAIN_TIMES = 2
WORST: tuple[Outcome, ...] = ("silent", "unreachable", "refused", "stranger", "open")


class Coordinator:
    """One examination; `channels` has the hosts that answer, by their places in the survey."""

    def __init__(
        self, survey: Survey, begin: Mapping[str, Any], progress: Progress, *, python: str = sys.executable
    ) -> None:
        self.survey, self.begin, self.progress, self.python = survey, begin, progress, python
        self.channels: dict[int, Channel] = {}
        self.ports: dict[int, dict[str, Any]] = {}
        self._stay: asyncio.Task[None] | None = None

    async def examine(self, openers: Sequence[Opener]) -> None:
        """All phases; the survey is filled as far as could be learned."""
        started = time.monotonic()
        try:
            await self._welcome(openers)
            self._stay = asyncio.create_task(self._keep_in_touch())
            facts = asyncio.create_task(self._facts())
            await self._names()
            await self._ports()
            await facts
            await self._speed()
        finally:
            self.survey.elapsed_s = time.monotonic() - started

    async def close(self, **farewell: Any) -> None:
        if self._stay is not None:
            self._stay.cancel()
        await asyncio.gather(*(channel.close(**farewell) for channel in self.channels.values()))

    async def ask_all(
        self, action: str, limit_s: float, arguments: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Any]:
        """The answers of those that gave one; who is gone becomes absent."""
        numbers = [number for number in arguments if self.survey.hosts[number].is_here]
        answers = await asyncio.gather(
            *(self._ask(number, action, limit_s, **arguments[number]) for number in numbers)
        )
        return {number: answer for number, answer in zip(numbers, answers, strict=True) if answer is not None}

    async def _ask(self, number: int, action: str, limit_s: float, **arguments: Any) -> Any:
        try:
            return await self.channels[number].ask(action, limit_s, **arguments)
        except NodeGoneError as error:
            self._lose(number, error)
        except NodeError as error:
            self.survey.hosts[number].troubles.append(f"{action}: {error.what}")
        return None

    def _lose(self, number: int, error: NodeGoneError) -> None:
        host = self.survey.hosts[number]
        if error.code is not None or error.words:
            host.absent, host.absent_fix = self._cause(host.name, error.code, error.words.splitlines())
        else:
            host.absent = error.what
            host.absent_fix = f"look at what {host.name} is doing, and run the doctor again"

    def _cause(self, name: str, code: int | None, said: Sequence[str]) -> SshProblem:
        known = known_problem(name, code, said, python=self.python, cwd=str(Path.cwd()))
        unknown = f"the doctor's program ended there: {last_line(said, code)}"
        return known or SshProblem(unknown, f"ssh {name} {self.python} -V, and look what it says")

    # 1. Welcome

    async def _welcome(self, openers: Sequence[Opener]) -> None:
        tasks = [
            asyncio.create_task(self._welcome_one(number, opener)) for number, opener in enumerate(openers)
        ]
        self.progress(f"{len(tasks)} hosts: starting the doctor on each")
        _, late = await asyncio.wait(tasks, timeout=WELCOME_S)
        for number, task in enumerate(tasks):
            if task in late:
                task.cancel()
                self._miss(self.survey.hosts[number])
        await asyncio.gather(*tasks)
        self.progress(f"{len(self.survey.here())} of {len(tasks)} hosts answer")

    def _miss(self, host: HostSeen) -> None:
        if self.survey.names_matter:
            host.absent = f"ssh is there, but Python has not started within {WELCOME_S:g} s"
            host.absent_fix = (
                f"time ssh {host.name} {self.python} -V: see what that waits for, the login or a file system"
            )
        else:
            host.absent = f"it came, and then said nothing for {WELCOME_S:g} s"
            host.absent_fix = f"look at what {host.name} is doing, and run the doctor again"

    async def _welcome_one(self, number: int, opener: Opener) -> None:
        host = self.survey.hosts[number]
        if host.absent is not None:
            return
        try:
            channel = self.channels[number] = await opener()
            await channel.meet()
            told = await channel.ask("begin", WELCOME_S, **self.begin)
            self._introduce(number, read_field({"begin": told}, "begin", dict))
            host.clock_s = await self._clock(channel)
        except asyncio.CancelledError:
            return  # too late; the caller says so
        except FrameError as error:
            self._lose(number, NodeGoneError(f"it does not answer as the doctor does: {error.what}"))
        except (NodeGoneError, NodeError, OSError) as error:
            gone = error if isinstance(error, NodeGoneError) else NodeGoneError(str(error))
            self._lose(number, gone)

    def _introduce(self, number: int, told: Message) -> None:
        host, hostname = self.survey.hosts[number], read_field(told, "host", str)
        if not hostname.isprintable():
            raise FrameError(WRONG_FIELD, "its host name would not be readable on a screen")
        host.interfaces = read_list(told, "interfaces", dict, MOST_INTERFACES)
        host.gloo, host.nccl = told.get("gloo"), told.get("nccl")
        host.variables = read_field(told, "variables", dict)
        host.address = host.address or told.get("reached_at")
        self._name(number, hostname)

    def _name(self, number: int, hostname: str) -> None:
        """By hand nobody has said what the hosts are called: they say it themselves."""
        host = self.survey.hosts[number]
        host.hostname = hostname
        if not self.survey.names_matter:
            host.name = f"{hostname} (node {number})"
            host.called = host.called or hostname

    async def _clock(self, channel: Channel) -> float:
        """How far the node's clock is ahead of ours: by the answer with the shortest way, half of which it is old."""
        reads = []
        for _ in range(CLOCK_READS):
            begin, begun = time.time(), time.monotonic()
            theirs = float(await channel.ask("clock", ANSWER_S))
            took = time.monotonic() - begun
            reads.append((took, theirs - begin - took / 2))
        return min(reads)[1]

    async def _keep_in_touch(self) -> None:
        while True:
            await asyncio.sleep(STAY_EVERY_S)
            await asyncio.gather(*(self.channels[number].stay() for number in self.survey.here()))

    async def _facts(self) -> None:
        answers = await self.ask_all("facts", FACTS_S, {number: {} for number in self.survey.here()})
        for number, facts in answers.items():
            with self._as_agreed(number):
                self.survey.hosts[number].facts = read_field({"facts": facts}, "facts", dict)

    # 2. Names

    async def _names(self) -> None:
        here = self.survey.here()
        self.progress("every pair: names, then ports")
        names = [self.survey.hosts[number].called for number in here]
        answers = await self.ask_all("names", ANSWER_S, {number: {"names": names} for number in here})
        for source, answer in answers.items():
            with self._as_agreed(source):
                for target in (number for number in here if number != source):
                    edge, found = self.survey.edge(source, target), answer[self.survey.hosts[target].called]
                    edge.addresses, edge.name_error = found.get("addresses", []), found.get("error")
        choose_addresses(self.survey)

    # 3. Ports

    async def _ports(self) -> None:
        token = secrets.token_hex(TOKEN_BYTES)
        requests = {number: self._listen_request(number, token) for number in self.survey.here()}
        for number, opened in (await self.ask_all("listen", ANSWER_S, requests)).items():
            with self._as_agreed(number):
                self.survey.hosts[number].meeting_error = opened.get("meeting_error")
                read_list(opened, "data", int, DATA_PORTS)
                self.ports[number] = opened
        plans = {number: list(targets_of(self.survey, number, self.ports)) for number in self.ports}
        requests = {number: {"targets": [request for _, request in plan]} for number, plan in plans.items()}
        for source, results in (await self.ask_all("probe", PROBE_S, requests)).items():
            with self._as_agreed(source):
                for (kind, request), result in zip(plans[source], results, strict=True):
                    self._note(source, request["node"], kind, result)

    @contextlib.contextmanager
    def _as_agreed(self, number: int) -> Iterator[None]:
        """A node of another version, or a stranger, may answer in any form: it is left out, and the others go on."""
        try:
            yield
        except (FrameError, LookupError, TypeError, ValueError, AttributeError) as error:
            self._lose(number, NodeGoneError(f"it does not answer as the doctor does: {error!r}"))

    def _listen_request(self, number: int, token: str) -> dict[str, Any]:
        host = self.survey.hosts[number]
        meets_here = number == 0 and self.survey.meeting_is_tried
        return {
            "token": token,
            "node": number,
            "address": host.address,
            "ports": DATA_PORTS,
            "others": other_addresses(self.survey, number),
            "meeting_port": self.survey.meeting_port if meets_here else None,
        }

    def _note(self, source: int, target: int, kind: str, result: dict[str, Any]) -> None:
        edge, outcome = self.survey.edge(source, target), result["outcome"]
        if kind == "meeting":
            edge.meeting = outcome
        elif kind == "data":
            edge.data = min(edge.data or "open", outcome, key=WORST.index)
            if "received" in result:
                edge.received, edge.passes = result["received"], result.get("passes")
        else:
            edge.others = {**(edge.others or {}), kind: outcome}

    # 4. Speed

    async def _speed(self) -> None:
        ways = [way for way in self.survey.pairs() if self._is_measurable(way)]
        begun = time.monotonic()
        await self._rounds(ways, "speed")
        for _ in range(AGAIN_TIMES):
            if time.monotonic() - begun > SPEED_BUDGET_S:
                return  # lines so slow that they took all the time need no second look
            known = {way: speed for way in ways if (speed := self.survey.edge(*way).bytes_per_s)}
            if not known:
                return
            usual = usual_speed(known.values())
            await self._rounds([way for way in known if known[way] < AGAIN_SHARE * usual], "slow ones again")

    def _is_measurable(self, way: Pair) -> bool:
        edge = self.survey.edge(*way)
        return edge.data == "open" and not edge.has_hole

    async def _rounds(self, ways: Sequence[Pair], title: str) -> None:
        planned = rounds_of(len(self.survey.hosts), ways)
        seconds = min(LONGEST_S, max(SHORTEST_S, SPEED_BUDGET_S / (2 * len(planned) or 1)))
        wanted = set(ways)
        for place, pairs in enumerate(planned, start=1):
            self.progress(f"{title}: round {place} of {len(planned)}")
            await asyncio.gather(*(self._pair(pair, wanted, seconds) for pair in pairs))

    def _pair(self, pair: Pair, wanted: set[Pair], seconds: float) -> Coroutine[Any, Any, None]:
        return self._both_ways([way for way in (pair, pair[::-1]) if way in wanted], seconds)

    async def _both_ways(self, ways: Sequence[tuple[int, ...]], seconds: float) -> None:
        """One after the other, so that they do not share the line."""
        for source, target in ways:
            if not (self.survey.hosts[source].is_here and self.survey.hosts[target].is_here):
                continue
            request = {
                "node": target,
                "address": self.survey.hosts[target].address,
                "port": self.ports[target]["data"][0],
            }
            result = await self._ask(source, "measure", MEASURE_S, target=request, seconds=seconds)
            with self._as_agreed(source):
                self._note_speed(source, target, result or {})

    def _note_speed(self, source: int, target: int, result: dict[str, Any]) -> None:
        """The best of what was seen: nothing makes a line look faster than it is."""
        edge = self.survey.edge(source, target)
        edge.error = result.get("error")
        if "bytes_per_s" in result:
            edge.bytes_per_s = max(edge.bytes_per_s or 0.0, result["bytes_per_s"])
            edge.latency_s = min(edge.latency_s or result["latency_s"], result["latency_s"])
