"""Starts the doctor on all hosts, asks them together, and keeps track of those that do not answer.

A host that has not answered by its limit is absent from then on; what is known about it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.launch.ssh.client import SshProblem, known_problem, last_line
from drumline.net.frames import WRONG_FIELD, FrameError, Message, read_field, read_list
from drumline.tools.doctor.pairs.node_client import NodeClient, NodeLostError, NodeRequestError
from drumline.tools.doctor.pairs.survey import Survey

# For a login and a start of Python on a busy host; with a missing host the whole check takes 15 s
# at most.
START_S = 8.0
ANSWER_S = 6.0
CLOCK_READS = 4
MAX_INTERFACES = 4096
KEEP_ALIVE_S = 8.0
Opener = Callable[[], Awaitable[NodeClient]]
Progress = Callable[[str], None]


class Coordinator:
    """All hosts of one check; `clients` has those that were started, by their numbers in the
    survey."""

    def __init__(
        self,
        survey: Survey,
        settings: Mapping[str, Any],
        progress: Progress,
        *,
        python: str = sys.executable,
    ) -> None:
        """`settings`: the `HostSettings` for the hosts, as JSON."""
        self.survey = survey
        self.settings = settings
        self.progress = progress
        self.python = python
        self.clients: dict[int, NodeClient] = {}
        self._keeping_alive: asyncio.Task[None] | None = None

    async def start(self, openers: Sequence[Opener]) -> None:
        tasks = [
            asyncio.create_task(self._start(number, opener))
            for number, opener in enumerate(openers)
        ]
        self.progress(f"{len(tasks)} hosts: starting the doctor on each")
        _, late = await asyncio.wait(tasks, timeout=START_S)
        for number, task in enumerate(tasks):
            if task in late:
                task.cancel()
                host = self.survey.hosts[number]
                if self.survey.by_ssh:
                    host.absent = f"ssh connects, but Python has not started within {START_S:g} s"
                    host.absent_fix = f"time ssh {host.name} {self.python} -V: the login or a file system may be slow"
                else:
                    self._lose(
                        number, NodeLostError(f"it joined, and then sent nothing for {START_S:g} s")
                    )
        await asyncio.gather(*tasks)
        self.progress(f"{len(self.survey.present())} of {len(tasks)} hosts answer")
        self._keeping_alive = asyncio.create_task(self._keep_alive())

    async def close(self, **last: Any) -> None:
        """`last`: sent to every host with the request to exit."""
        if self._keeping_alive is not None:
            self._keeping_alive.cancel()
        await asyncio.gather(*(client.close(**last) for client in self.clients.values()))

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

    async def _start(self, number: int, opener: Opener) -> None:
        host = self.survey.hosts[number]
        if host.absent is not None:
            return
        try:
            client = self.clients[number] = await opener()
            await client.wait_for_hello()
            answer = await client.ask("begin", START_S, **self.settings)
            with self.reading_answer(number):
                self._introduce(number, answer)
                host.clock_s = await _clock_offset(client)
        except asyncio.CancelledError:
            return  # too late, which the caller reports
        except NodeLostError as error:
            self._lose(number, error)
        except (NodeRequestError, OSError) as error:
            self._lose(number, NodeLostError(str(error)))

    def _introduce(self, number: int, answer: Message) -> None:
        host = self.survey.hosts[number]
        hostname = read_field(answer, "host", str)
        if not hostname.isprintable():
            raise FrameError(WRONG_FIELD, "its host name is not printable")
        host.interfaces = read_list(answer, "interfaces", dict, MAX_INTERFACES)
        host.gloo = answer.get("gloo")
        host.nccl = answer.get("nccl")
        host.variables = read_field(answer, "variables", dict)
        host.address = host.address or answer.get("reached_at")
        host.hostname = hostname
        if not self.survey.by_ssh:  # the user has not named the hosts
            host.name = f"{hostname} (node {number})"
            host.called = host.called or hostname

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await asyncio.gather(
                *(self.clients[number].keep_alive() for number in self.survey.present())
            )

    def _lose(self, number: int, error: NodeLostError) -> None:
        host = self.survey.hosts[number]
        stderr_lines = error.stderr.splitlines()
        cause = SshProblem(error.what, f"check what {host.name} is doing, and run the doctor again")
        if error.code is not None or stderr_lines:
            unknown = f"the doctor's program exited there: {last_line(stderr_lines, error.code)}"
            cause = known_problem(
                host.name, error.code, stderr_lines, python=self.python, cwd=str(Path.cwd())
            ) or SshProblem(unknown, f"read the output of ssh {host.name} {self.python} -V")
        host.absent, host.absent_fix = cause


async def _clock_offset(client: NodeClient) -> float:
    """How far the node's clock is ahead of ours, by the fastest answer, minus half of its round
    trip."""
    reads = []
    for _ in range(CLOCK_READS):
        begin = time.time()
        begun = time.monotonic()
        node_time = float(await client.ask("clock", ANSWER_S))
        took = time.monotonic() - begun
        reads.append((took, node_time - begin - took / 2))
    return min(reads)[1]
