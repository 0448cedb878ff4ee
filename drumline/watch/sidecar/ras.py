"""Asks NCCL's RAS thread what it knows about the ranks of this job: one more witness of a hang.

Each process that uses NCCL has such a thread, and all of them listen at one port of the host. NCCL
2.28.7 and newer answer in JSON, and older ones are not asked. RAS may report healthy ranks during a
hang, so its answer decides nothing: it is evidence in the diagnosis file, beside the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.base.untrusted import DOCUMENT_BYTES, parse_json, whole_number
from drumline.watch.cluster_state import RasRank

# RAS answers after its TIMEOUT (whole seconds) without the peers that are silent, and that answer
# is awaited.
LIMIT_S = 1.5
# All processes share the port, and the kernel chooses one for each connection. One that is stopped
# never answers.
HANDSHAKE_S = 0.2
LOCALHOST = ("127.0.0.1", "::1")
REQUEST = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nSTATUS\n"
HELLO = b"SERVER PROTOCOL "
DONE = b"OK\n"
# NCCL 2.28 leaves out this comma.
_NO_COMMA = re.compile(rb'("nvml_dev": -?\d+)(\s*"status")')
# Their counts differ across ranks in a healthy run.
POINT_TO_POINT = ("Send", "Recv", "SendRecv")
IN_PROGRESS = 7  # ncclInProgress, which is not an error


async def ask_ras(address: str, pids: Mapping[int, int], world_size: int) -> tuple[RasRank, ...]:
    """What RAS at this address (`HOST:PORT`) knows about each rank of the job; empty if nothing of
    this job answers there within LIMIT_S, or if it is not an address of the loopback. `pids`: of
    this node's ranks, by rank."""
    with contextlib.suppress(Exception):  # whatever answers there, a diagnosis does not fail for it
        for host, port in loopback_places(address):
            with contextlib.suppress(ConnectionRefusedError):
                async with asyncio.timeout(LIMIT_S):
                    return read_status(await request_status(host, port), pids, world_size)
    return ()


def loopback_places(address: str) -> list[tuple[str, int]]:
    """The addresses and the port to connect to; empty if others than this host could answer
    there."""
    host, _, digits = address.rpartition(":")
    port = whole_number(digits)
    host = host.strip("[]")
    if port is None or not 0 < port < 65536:
        return []
    if host == "localhost":
        return [(loopback, port) for loopback in LOCALHOST]
    try:
        return [(host, port)] if ipaddress.ip_address(host).is_loopback else []
    except ValueError:
        return []


async def request_status(host: str, port: int) -> bytes:
    """The answer of RAS, as JSON text; the caller limits the time."""
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(REQUEST)
            with contextlib.suppress(TimeoutError):
                head = await asyncio.wait_for(reader.readline(), HANDSHAKE_S)
                lines = [await reader.readline() for _ in range(2)]
                if not head.startswith(HELLO) or any(line != DONE for line in lines):
                    raise ValueError(f"not RAS, or a version without JSON: {head!r}")
                return await _read_to_end(reader)
        finally:
            writer.close()


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while part := await reader.read(1 << 16):
        content += part
        if len(content) > DOCUMENT_BYTES:
            raise ValueError("the answer is too long")
    return bytes(content)


def read_status(document: bytes, pids: Mapping[int, int], world_size: int) -> tuple[RasRank, ...]:
    """By rank, over the communicators that have all ranks of this job. Several jobs may share the
    port: a communicator belongs to this one if a rank of this node is in it, with its pid."""
    ranks: dict[int, RasRank] = {}
    for communicator in parse_json(_NO_COMMA.sub(rb"\1,\2", document))["communicators"]:
        members = communicator["ranks"]
        missing = communicator["missing_ranks"]
        is_ours = any(pids.get(entry["rank"]) == entry["pid"] for entry in (*members, *missing))
        if communicator["size"] == world_size and is_ours:
            for entry in (*_members(members), *_missing(missing)):
                ranks[entry.rank] = _merged(ranks.get(entry.rank), entry)
    return tuple(entry for _, entry in sorted(ranks.items()) if entry.rank < world_size)


def _members(entries: Sequence[Mapping[str, Any]]) -> list[RasRank]:
    ranks = []
    for entry in entries:
        status = entry["status"]
        codes = [int(status[name]) for name in ("init_state", "async_error")]
        counts = [
            int(count)
            for op, count in entry["collective_counts"].items()
            if op not in POINT_TO_POINT
        ]
        error = next((code for code in codes if code not in (0, IN_PROGRESS)), 0)
        is_aborted = bool(status["abort_flag"])
        ranks.append(
            RasRank(
                rank=int(entry["rank"]),
                num_collectives=sum(counts),
                error=error,
                is_aborted=is_aborted,
            )
        )
    return ranks


def _missing(entries: Sequence[Mapping[str, Any]]) -> list[RasRank]:
    """Ranks that do not answer RAS; or that do, and are not in this communicator any more, or not
    yet."""
    return [
        RasRank(
            rank=int(entry["rank"]), answers=not entry["status"]["unresponsive"], is_member=False
        )
        for entry in entries
    ]


def _merged(before: RasRank | None, entry: RasRank) -> RasRank:
    """A rank in two communicators."""
    if before is None:
        return entry
    return RasRank(
        rank=entry.rank,
        answers=before.answers and entry.answers,
        is_member=before.is_member and entry.is_member,
        num_collectives=before.num_collectives + entry.num_collectives,
        error=before.error or entry.error,
        is_aborted=before.is_aborted or entry.is_aborted,
    )
