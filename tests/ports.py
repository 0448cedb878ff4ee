"""Which addresses of this machine a port is open on, as the kernel tells it."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

LISTENS = "0A"


def listening_addresses(port: int) -> set[str]:
    """`0.0.0.0` and `::` are all of them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            digits, _, at = address.rpartition(":")
            if state == LISTENS and int(at, 16) == port:
                found.add(_text(digits))
    return found


def _text(digits: str) -> str:
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
