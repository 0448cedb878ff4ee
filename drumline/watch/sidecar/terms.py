"""What a sidecar is told when it starts: a JSON document on stdin: nothing secret is on a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from drumline.watch.sidecar.channel import Peer


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The node, its ranks, the other nodes, and what is to be done about a hang."""

    folder: str
    """The watch folder: of this node and this start of its ranks."""
    owns_folder: bool
    """Whether it goes with the sidecar; a launcher removes its own."""
    node: int
    host: str
    ranks: tuple[int, ...]
    world_size: int
    run: str | None = None
    """Where diagnoses are written down."""
    on_hang: str = "restart"
    hang_s: float | None = None
    """None: what may be innocent is reported, and never acted on."""
    slow_factor: float = 2.0
    secret: str = field(default="", repr=False)
    peers: tuple[Peer, ...] = ()
    """The other nodes."""
    listener: int | None = None
    """The socket that it takes over from local rank 0, which keeps it open for the next one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def terms_from_json(text: str) -> Terms:
    record: Mapping[str, Any] = json.loads(text)
    return Terms(
        **{
            **record,
            "ranks": tuple(record["ranks"]),
            "peers": tuple(Peer(**peer) for peer in record["peers"]),
        }
    )
