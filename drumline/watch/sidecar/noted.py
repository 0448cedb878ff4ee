"""What the ranks of this node noted of their script: read from files, and sent to every sidecar that may decide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.log import log
from drumline.untrusted import parse_json
from drumline.watch.sidecar.channel import Channel
from drumline.watch.sidecar.terms import Terms
from drumline.watch.sidecar.wire import MAX_BYTES

MAX_NOTE_BYTES = MAX_BYTES - 1024
MAX_UNSENT_BYTES = 1 << 16
"""Of a line that takes a note: heartbeats come first."""


class Noted:
    """The latest note of each rank. It is sent again where it did not go out, but for one that is too long."""

    def __init__(self, terms: Terms) -> None:
        self._files = {rank: Path(terms.folder, f"rank-{rank:05d}.notes") for rank in terms.ranks}
        self._peers = [peer.node for peer in terms.peers]
        self._read: dict[int, int] = {}
        self._records: dict[int, Any] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._too_long: set[int] = set()

    def look(self, channel: Channel | None) -> Iterator[tuple[int, Any]]:
        """Ranks whose notes have changed, with these as JSON has them."""
        for rank, file in self._files.items():
            try:
                changed = file.stat().st_mtime_ns
                if changed != self._read.get(rank):
                    text = file.read_bytes()
                    self._records[rank] = parse_json(text)
                    self._read[rank] = changed
                    if len(text) > MAX_NOTE_BYTES:
                        self._drop(rank, len(text))
                    yield rank, self._records[rank]
            except (OSError, ValueError):  # a script that is not there yet, or has ended
                continue
        if channel is not None:
            self._send(channel)

    def _drop(self, rank: int, num_bytes: int) -> None:
        self._sent.update({(node, rank): self._read[rank] for node in self._peers})
        if rank not in self._too_long:
            self._too_long.add(rank)
            log.warning(
                f"rank {rank}: {num_bytes} bytes about its script and its parameters are more than the "
                f"{MAX_NOTE_BYTES} that sidecars send each other; it is not compared with the ranks of other nodes"
            )

    def _send(self, channel: Channel) -> None:
        for rank, record in self._records.items():
            for node in self._peers:
                if self._sent.get((node, rank)) != self._read[rank] and channel.send(
                    node, {"kind": "note", "rank": rank, "note": record}, max_unsent=MAX_UNSENT_BYTES
                ):
                    self._sent[node, rank] = self._read[rank]
