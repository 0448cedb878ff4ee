"""Requests to the `node_server.py` of one host, over a connection of the launcher."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.base.errors import PreflightError
from drumline.launch.ssh.client import no_client, ssh_problem
from drumline.launch.ssh.host_connection import HostConnection
from drumline.tools.doctor.pairs.node_server import PROTOCOL


class NodeLostError(PreflightError):
    """The node has exited, or does not answer any more."""


class NodeRequestError(PreflightError):
    """The node answers, but could not do what was asked."""


class NodeClient:
    """One node. `python`: what runs it, for messages."""

    def __init__(self, connection: HostConnection, *, python: str = sys.executable) -> None:
        self.connection = connection
        self.python = python
        self.lost: NodeLostError | None = None
        self._numbers = itertools.count(1)
        self._hello: asyncio.Future[Any] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def clock_ahead_s(self) -> float:
        """How far the node's clock is ahead of ours; known when it has answered."""
        # Its heartbeats have the time of day.
        return self.connection.clock_ahead_s - (time.time() - time.monotonic())

    async def open(self) -> None:
        """Wait until the node has answered; at once if it has."""
        if self._hello is None:
            self._hello = self._waiting[0] = asyncio.get_running_loop().create_future()
            self.connection.on_frame = self._receive
            try:
                closed = await self.connection.open()
            except OSError as error:
                refusal = no_client(self.connection.words[0], error)
                raise NodeLostError(refusal.what, next_step=refusal.next_step) from error
            closed.add_done_callback(self._closed)
        await self._hello

    async def ask(self, action: str, limit_s: float, /, **arguments: Any) -> Any:
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
        if frame["kind"] == "hello":
            if frame["protocol"] != PROTOCOL:
                self._lose("its version of drumline is different")
            elif not self._waiting[0].done():
                self._waiting[0].set_result(None)
            return
        answer = self._waiting.get(frame.get("id", 0))
        if answer is None or answer.done():
            return  # the request has timed out
        if "error" in frame:
            answer.set_exception(NodeRequestError(str(frame["error"])))
        else:
            answer.set_result(frame.get("ok"))

    def _closed(self, closed: asyncio.Task[None]) -> None:
        connection = self.connection
        error = None if closed.cancelled() else closed.exception()
        if error is not None or not connection.words:
            self._lose(str(error or "it disconnected during the check"))
            return
        problem = ssh_problem(
            connection.host.name,
            connection.ssh_code or 0,
            list(connection.stderr) or list(connection.stdout),
            python=self.python,
            cwd=str(Path.cwd()),
            is_stuck=connection.is_stuck,
        )
        self._lose(*problem)

    def _lose(self, what: str, next_step: str | None = None) -> NodeLostError:
        self.lost = self.lost or NodeLostError(what, next_step=next_step)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.lost)
        return self.lost
