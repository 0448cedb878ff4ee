"""Answers GET /metrics and GET /healthz on one address, and nothing else.

It runs in the sidecar, which must stay quick: connections are few, short and small, and a new one
replaces the oldest. A port that is taken is tried again: the sidecar of the start before may still
have it.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drumline.base.errors import MissingExtraError
from drumline.config.rules import metrics_endpoint
from drumline.watch.sidecar.local_ranks import LocalRanks
from drumline.watch.sidecar.sidecar_options import SidecarOptions

if TYPE_CHECKING:
    from drumline.watch.sidecar.prometheus_metrics import NodeMetrics

MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8192
REQUEST_S = 5.0
RETRY_S = 1.0

# A sidecar may outlive its ranks by less than this.
TAKEN_S = 15.0
EXTRA = "prometheus"


async def serve_metrics(
    options: SidecarOptions, ranks: LocalRanks, report: Callable[[str], None]
) -> None:
    """Until it is cancelled; what is wrong is reported, and ends nothing else."""
    try:
        from drumline.watch.sidecar.prometheus_metrics import NodeMetrics
    except ImportError:
        error = MissingExtraError("log.prometheus", extra=EXTRA)
        report(f"warning: {options.host} serves no metrics: {error.what}. Try: {error.next_step}")
        return

    endpoint = metrics_endpoint(options.prometheus)
    assert endpoint is not None  # it was checked
    await MetricsServer(NodeMetrics(options, ranks), *endpoint, options.host, report).serve()


@dataclass(frozen=True)
class MetricsServer:
    """Answers one request on each connection."""

    metrics: NodeMetrics
    address: str
    port: int
    host: str
    report: Callable[[str], None]
    connections: dict[asyncio.StreamWriter, None] = field(default_factory=dict)
    """In the order of their arrival."""

    async def serve(self) -> None:
        """Until it is cancelled. A port that the system chose is reported."""
        server = await self._listen()
        if self.port == 0:
            address, port = server.sockets[0].getsockname()[:2]
            name = f"[{address}]" if ":" in address else address
            self.report(f"metrics of {self.host}: http://{name}:{port}/metrics")

        await server.serve_forever()

    async def _listen(self) -> asyncio.Server:
        """As soon as the port is free; one that stays taken is reported once."""
        began_s = time.monotonic()
        has_warned = False
        while True:
            try:
                return await asyncio.start_server(
                    self._answer, self.address, self.port, limit=MAX_REQUEST_BYTES
                )
            except OSError as error:
                is_late = time.monotonic() - began_s > TAKEN_S
                if not has_warned and (is_late or error.errno != errno.EADDRINUSE):
                    has_warned = True
                    self._warn(error)

                await asyncio.sleep(RETRY_S)

    def _warn(self, error: OSError) -> None:
        """That the port cannot be had."""
        self.report(
            f"warning: {self.host} serves no metrics at {self.address} port {self.port}: {error.strerror}; it is "
            "tried again and again. Try: another port for each job of a host, or --log.prometheus 0 for a free one"
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for one request."""
        if len(self.connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self.connections))
            del self.connections[oldest]
            oldest.transport.abort()

        self.connections[writer] = None
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(request))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self.connections.pop(writer, None)
            writer.transport.abort()

    async def _response(self, request: bytes) -> bytes:
        """To a whole request, as in `GET /metrics HTTP/1.1` and its headers."""
        line, *headers = request.split(b"\r\n")
        if not self._is_own(headers):
            return response(b"403 Forbidden", b"")

        match line.split(b" ")[:2]:
            case [b"GET", b"/metrics"]:
                return response(b"200 OK", await self.metrics.text())
            case [b"GET", b"/healthz"]:
                return response(b"200 OK", b"ok\n")
            case [b"GET", _]:
                return response(b"404 Not Found", b"")

        return response(b"405 Method Not Allowed", b"")

    def _is_own(self, headers: list[bytes]) -> bool:
        """On the loopback, whether the request names it so: a page in a browser of this machine
        whose own name resolves to it may not read the answer."""
        if not ipaddress.ip_address(self.address).is_loopback:
            return True

        fields = dict(header.lower().partition(b":")[::2] for header in headers)
        name = fields.get(b"host", b"").strip().rpartition(b":")[0]
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name.strip(b"[]").decode()))

        return name == b"localhost"


def response(status: bytes, body: bytes) -> bytes:
    """A whole answer in HTTP."""
    head = (
        b"HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: %d\r\n"
        b"X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head % (status, len(body)) + body
