"""How fast one host is reached from this one: the time of a small message there and back, and bytes per second."""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from typing import Any

from drumline.doctor.pairs.listeners import COUNT_AND_SECONDS, IDLE_S, PING, PING_BYTES, SPEED, read_exactly
from drumline.doctor.pairs.probe import Target, call

PINGS = 20
PINGS_LIMIT_S = 0.3
# 100 Gbit/s is past what one thread can send; enough for that in the time below, and an end for those who are faster.
MOST_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20


def measure(target: Target, token: bytes, seconds: float) -> dict[str, Any]:
    """`latency_s` (half of the median there and back) and `bytes_per_s`, or `error`."""
    try:
        latency_s = _latency(target, token)
        return {"latency_s": latency_s, "bytes_per_s": _bandwidth(target, token, seconds)}
    except OSError as error:
        return {"error": str(error) or type(error).__name__}


def _latency(target: Target, token: bytes) -> float:
    times: list[float] = []
    with call(target, token, PING) as line:
        begin = time.monotonic()
        while len(times) < PINGS and time.monotonic() - begin < PINGS_LIMIT_S:
            sent = time.monotonic()
            line.sendall(bytes(PING_BYTES))
            read_exactly(line, PING_BYTES)
            times.append(time.monotonic() - sent)
    return statistics.median(times) / 2


def _bandwidth(target: Target, token: bytes, seconds: float) -> float:
    with call(target, token, SPEED, MOST_BYTES, seconds) as line:
        # Until the other side has seen enough, which it says: our own send buffer takes megabytes at once.
        _send_until_answered(line, deadline=time.monotonic() + seconds + IDLE_S)
        line.settimeout(IDLE_S)
        taken, elapsed = COUNT_AND_SECONDS.unpack(read_exactly(line, COUNT_AND_SECONDS.size))
        # What is still in the send buffer is thrown away: on a slow line it would be on its way for half a minute, and
        # in the way of the next transfer.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return float(taken / elapsed) if elapsed > 0 else 0.0


def _send_until_answered(line: socket.socket, deadline: float) -> None:
    chunk = memoryview(bytes(CHUNK_BYTES))
    line.setblocking(False)
    poll = select.poll()
    poll.register(line, select.POLLIN | select.POLLOUT)
    while (left := deadline - time.monotonic()) > 0:
        for _, events in poll.poll(left * 1000):
            if events & ~select.POLLOUT:
                return
            line.send(chunk)
    raise TimeoutError("the transfer did not end")
