"""What the ranks of this node noted of their script: read from files, and sent to every sidecar that may decide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.watch.sidecar.channel import Channel
from drumline.watch.sidecar.terms import Terms


class Noted:
    """The latest note of each rank. It is sent again where it did not go out."""

    def __init__(self, terms: Terms) -> None:
        self._files = {rank: Path(terms.folder, f"rank-{rank:05d}.notes") for rank in terms.ranks}
        self._peers = [peer.node for peer in terms.peers]
        self._read: dict[int, int] = {}
        self._records: dict[int, Any] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def look(self, channel: Channel | None) -> Iterator[tuple[int, Any]]:
        """Ranks whose notes have changed, with these as JSON has them."""
        for rank, file in self._files.items():
            try:
                changed = file.stat().st_mtime_ns
                if changed != self._read.get(rank):
                    self._records[rank] = json.loads(file.read_bytes())
                    self._read[rank] = changed
                    yield rank, self._records[rank]
            except (OSError, ValueError):  # a script that is not there yet, or has ended
                continue
        if channel is not None:
            self._send(channel)

    def _send(self, channel: Channel) -> None:
        for rank, record in self._records.items():
            for node in self._peers:
                if self._sent.get((node, rank)) != self._read[rank] and channel.send(
                    node, {"kind": "note", "rank": rank, "note": record}
                ):
                    self._sent[node, rank] = self._read[rank]
