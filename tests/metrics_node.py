"""A node that serves its metrics: real heartbeats of this process, the sidecar's own observers and
server, on a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from drumline.watch.heartbeat import HeartbeatWriter
from drumline.watch.sidecar.local_ranks import LocalRanks
from drumline.watch.sidecar.metrics_server import serve_metrics
from drumline.watch.sidecar.sidecar_options import SidecarOptions

LIMIT_S = 20.0
SECRET = "a-secret-of-many-letters"
Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


class ServedNode:
    """Of two ranks, both written by this process. Its loop serves, as the sidecar's does."""

    def __init__(self, folder: Path, endpoint: str = "0", run: Path | None = None) -> None:
        watch_folder = folder / "start-2"
        watch_folder.mkdir(parents=True)
        self.heartbeats = [
            HeartbeatWriter(watch_folder / f"rank-{rank:05d}.heartbeat", rank=rank)
            for rank in range(2)
        ]
        options = SidecarOptions(
            folder=str(watch_folder), owns_folder=False, node=0, host="node-a", ranks=(0, 1), world_size=2,
            run=None if run is None else str(run), prometheus=endpoint, secret=SECRET,
        )  # fmt: skip
        self.ranks = LocalRanks(options)
        self.observe()
        self.lines: list[str] = []
        self.loop = asyncio.new_event_loop()
        self._serving = self.loop.create_task(serve_metrics(options, self.ranks, self.lines.append))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def observe(self) -> None:
        self.ranks.observe(time.monotonic(), {})

    def port(self) -> int:
        """Of a free port, which was printed."""
        end = time.monotonic() + LIMIT_S
        while not self.lines and time.monotonic() < end:
            time.sleep(0.01)
        return int(self.lines[0].rpartition(":")[2].partition("/")[0])

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        finally:
            self.loop.close()


def ask(port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n") -> bytes:
    """The whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    return answer


def scrape(port: int) -> str:
    head, _, body = ask(port).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
    return body.decode()


def parsed(text: str) -> Figures:
    """As prometheus_client reads it: values by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(figures: Figures, name: str, **labels: Any) -> float:
    """Of the one sample with this name, and these labels among its own."""
    wanted = {(label, str(text)) for label, text in labels.items()}
    (found,) = [
        number
        for (sample, own), number in figures.items()
        if sample == f"drumline_{name}" and wanted <= own
    ]
    return found


def write_events(path: Path, *events: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
