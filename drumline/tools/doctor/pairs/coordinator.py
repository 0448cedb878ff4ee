"""Starts the doctor on all hosts, asks them together, and keeps track of those that do not answer.

A host that has not answered by its limit is absent from then on; what is known about it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from drumline.base.errors import PreflightError
from drumline.net.frames import FrameError, Message, read_field, read_list
from drumline.tools.doctor.pairs.node_client import NodeClient, NodeLostError, NodeRequestError
from drumline.tools.doctor.pairs.survey import Survey

# For a login and a start of Python on a busy host; with a missing host the whole check takes 15 s
# at most.
START_S = 8.0
ANSWER_S = 6.0
MAX_INTERFACES = 4096
Progress = Callable[[str], None]


class Coordinator:
    """All hosts of one check."""

    def __init__(
        self,
        survey: Survey,
        clients: Sequence[NodeClient | None],
        settings: Mapping[str, Any],
        progress: Progress,
    ) -> None:
        """`clients`: of the hosts of the survey; None for one that is absent. `settings`: the
        `HostSettings` for the hosts, as JSON."""
        self.survey = survey
        self.settings = settings
        self.progress = progress
        self.clients = {
            number: client for number, client in enumerate(clients) if client is not None
        }

    async def start(self) -> None:
        num_hosts = len(self.survey.hosts)
        self.progress(f"{num_hosts} hosts: starting the doctor on each")
        await asyncio.gather(*map(self._start, self.clients))
        self.progress(f"{len(self.survey.present())} of {num_hosts} hosts answer")

    async def close(self, **last: Any) -> None:
        """`last`: sent to every host with the request to exit."""
        closing = (client.close(**last) for client in self.clients.values())
        await asyncio.gather(*closing, return_exceptions=True)

    def read_clocks(self) -> None:
        for number in self.survey.present():
            self.survey.hosts[number].clock_s = self.clients[number].clock_ahead_s

    async def ask_all(
        self, action: str, limit_s: float, requests: Mapping[int, Message]
    ) -> dict[int, Any]:
        present = set(self.survey.present())
        numbers = [number for number in requests if number in present]
        pending = (self.ask(number, action, limit_s, **requests[number]) for number in numbers)
        answers = await asyncio.gather(*pending)
        return {
            number: answer
            for number, answer in zip(numbers, answers, strict=True)
            if answer is not None
        }

    async def ask(self, number: int, action: str, limit_s: float, /, **arguments: Any) -> Any:
        """The answer; None if the host is lost or the request failed: the survey has the reason."""
        try:
            return await self.clients[number].ask(action, limit_s, **arguments)
        except NodeLostError as error:
            self._lose(number, error)
        except NodeRequestError as error:
            self.survey.hosts[number].errors.append(f"{action}: {error.what}")
        return None

    @contextlib.contextmanager
    def reading_answer(self, number: int) -> Iterator[None]:
        """If the answer has an unexpected form, from another version or program, the host becomes
        absent."""
        try:
            yield
        except (FrameError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = error.what if isinstance(error, FrameError) else repr(error)
            self._lose(number, NodeLostError(f"its answer is not that of the doctor: {reason}"))

    async def _start(self, number: int) -> None:
        client = self.clients[number]
        try:
            await client.open()
            answer = await client.ask("begin", ANSWER_S, **self.settings)
            with self.reading_answer(number):
                self._introduce(number, answer)
        except (NodeLostError, NodeRequestError) as error:
            self._lose(number, error)

    def _introduce(self, number: int, answer: Message) -> None:
        host = self.survey.hosts[number]
        host.interfaces = read_list(answer, "interfaces", dict, MAX_INTERFACES)
        host.gloo = answer.get("gloo")
        host.nccl = answer.get("nccl")
        host.variables = read_field(answer, "variables", dict)
        host.address = host.address or answer.get("reached_at")
        host.hostname = read_field(answer, "host", str)
        if not self.survey.by_ssh:  # the user has not named the hosts
            host.name = f"{host.hostname} (node {number})"
            host.called = host.called or host.hostname

    def _lose(self, number: int, error: PreflightError) -> None:
        host = self.survey.hosts[number]
        host.absent = error.what
        host.absent_fix = (
            error.next_step or f"check what {host.name} is doing, and run the doctor again"
        )
