"""Which addresses and ports of a machine are open, from the kernel."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

LISTENS = "0A"


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """All that listen in the network of that process: address and port. `0.0.0.0` and `::` are all
    addresses."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    open_ones = [words[1].rpartition(":") for words in lines if words[3] == LISTENS]
    return {(_text(digits), int(port, 16)) for digits, _, port in open_ones}


def listening_addresses(port: int) -> set[str]:
    return {address for address, at in listening() if at == port}


def _text(digits: str) -> str:
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
