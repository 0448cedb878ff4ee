"""The sidecars' port: a client without the secret gets nothing, changes nothing and blocks no
node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.net import connection, frames, handshake
from drumline.net.connection import CROWDED, LATE, MAX_PENDING, PeerConnection, PendingConnections
from drumline.net.frames import FrameError, Message, Session
from drumline.net.handshake import Agreed, nonce
from drumline.watch.sidecar import sidecar_network as timing
from drumline.watch.sidecar.sidecar_options import Peer
from tests.unit.watch.sidecar.networks import (
    SECRET,
    Node,
    listeners,
    nodes,
    peers_of,
    until,
    until_all_talk,
)


def hello(**changes: Any) -> bytes:
    return (
        json.dumps(
            {"drumline": "watch", "node": 1, "to": 0, "nonce": nonce(), "secret": True, **changes}
        ).encode()
        + b"\n"
    )


UNKNOWN_NODE = handshake.UNKNOWN_NODE
NO_JSON = frames.NOT_JSON
TOO_LONG = frames.TOO_LONG
JUNK = {
    b"GET / HTTP/1.1\r\nHost: node-a\r\n\r\n": NO_JSON,
    b"[]\n": NO_JSON,
    b"\n": NO_JSON,
    b"\xff\xfe\x00\n": NO_JSON,
    b"[" * 1000 + b"\n": NO_JSON,
    b'{"a":' * 200 + b"\n": NO_JSON,
    b'{"nonce": NaN}\n': NO_JSON,
    b'{"node": ' + b"9" * 900 + b"}\n": NO_JSON,
    b"x" * 1025: TOO_LONG,
    b" " * 1025 + b"{}\n": TOO_LONG,
    b"{}\n": UNKNOWN_NODE,
    hello(nonce="00"): NO_JSON,
    hello(nonce=nonce().upper().replace("0", "\u0660")): NO_JSON,
    hello(node=0): UNKNOWN_NODE,
    hello(node=7): UNKNOWN_NODE,
    hello(node=-1): UNKNOWN_NODE,
    hello(node=True): UNKNOWN_NODE,
    hello(node="1"): UNKNOWN_NODE,
    hello(node=1.0): UNKNOWN_NODE,
    hello(node=[1]): UNKNOWN_NODE,
    hello(to=1): UNKNOWN_NODE,
    hello(drumline="doctor"): UNKNOWN_NODE,
    hello(secret=False): handshake.WRONG_SECRET,
    hello() + b"{}\n": handshake.WRONG_SECRET,
    hello() + b'{"proof": "\\ud800"}\n': handshake.WRONG_SECRET,
    hello() + b'{"proof": ' + b"[" * 500 + b"\n": NO_JSON,
}


def test_junk_is_cut_off_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            line = zero.network._connections[1]
            for junk, why in JUNK.items():
                before = zero.network.refused[why]
                with contextlib.suppress(ConnectionResetError):
                    reader, writer = await asyncio.open_connection(
                        zero.peers[0].address, zero.peers[0].port
                    )
                    writer.write(junk)
                    answer = await asyncio.wait_for(reader.read(), 10)
                    assert b"proof" not in answer
                    writer.close()
                await until(
                    lambda b=before, w=why: zero.network.refused[w] == b + 1, f"{junk!r}: not {why}"
                )
            assert set(zero.network.refused) == set(JUNK.values())
            assert caplog.text.count("was closed") == len(set(JUNK.values())), (
                "an unknown client cannot fill the log"
            )
            assert "a connection with 127.0.0.1 was closed: not a JSON object" in caplog.text
            await until_all_talk([zero, one])
            assert zero.network._connections[1] is line

    asyncio.run(run())


leaves = [
    None,
    True,
    0,
    1,
    -1,
    1.5,
    10**400,
    "",
    "watch",
    "1",
    "\ud800",
    nonce(),
    [],
    [1],
    {},
    {"nonce": 1},
]
words = st.dictionaries(
    st.sampled_from(["drumline", "node", "to", "nonce", "proof", "refused"]),
    st.sampled_from(leaves),
)


@given(words, words)
def test_no_message_of_an_unauthenticated_client_is_accepted(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    for one in (handshake.answer(SECRET, "watch", 0, {1}), handshake.dial(SECRET, "watch", 1, 0)):
        next(one)
        with pytest.raises(FrameError):
            one.send(first), one.send(second)


def test_another_secret_is_refused_by_both_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "RETRY_S", 0.1)

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listens where node 0 should, and knows all but the secret: it sends back what it was
        sent."""
        await reader.readline()
        writer.write(json.dumps({"nonce": nonce()}).encode() + b"\n")
        writer.write(await reader.readline())
        assert await reader.read() in (b"",)
        writer.close()

    async def run() -> None:
        sockets = listeners(2)
        peers = peers_of(sockets)
        zero = await Node(0, peers, sockets[0]).start()
        node = await Node(1, peers, sockets[1], secret=b"another").start()
        await until(lambda: node.network.refused, "not refused")
        assert set(zero.network.refused) == {handshake.WRONG_SECRET}
        assert set(node.network.refused) == {handshake.NOT_TAKEN}
        assert node.network.connect_result(0) == handshake.NOT_TAKEN
        assert "with 127.0.0.1 was closed: another DRUMLINE_SECRET" in caplog.text
        assert not zero.heard
        assert not node.heard
        await node.close()
        liar = await asyncio.start_server(pretend, "127.0.0.1", 0)
        port = liar.sockets[0].getsockname()[1]
        node = await Node(1, [Peer(0, "liar", "127.0.0.1", port)], sockets[1]).start()
        await until(lambda: node.network.refused[handshake.WRONG_SECRET] > 1, "believed")
        assert node.network.connect_result(0) == handshake.WRONG_SECRET
        assert not node.heard
        liar.close()
        for each in (zero, node):
            await each.close()
        for each in sockets:
            each.close()

    asyncio.run(run())


Meddle = Callable[[bytes], list[bytes]]
MEDDLING: dict[str, Meddle] = {
    "changed": lambda line: [line.replace(b'"from"', b'"form"')],
    "changed seal": lambda line: [b"0" * 64 + line[64:]],
    "twice": lambda line: [line, line],
    "left out": lambda line: [],
    "put in": lambda line: [b'{"from":1}\n', line],
    "cut": lambda line: [line[:30] + b"\n"],
    "empty": lambda line: [b"\n", line],
}


class Middle:
    """Somebody on the way between node 1 and node 0."""

    def __init__(self, target: Peer) -> None:
        self.target = target
        self.meddle: Meddle | None = None
        self.recorded: list[bytes] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, away = await asyncio.open_connection(self.target.address, self.target.port)
        back = asyncio.create_task(self._carry(onward, writer, None))
        await self._carry(reader, away, self)
        await back

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, middle: Middle | None
    ) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                lines = [line]
                if middle is not None:
                    middle.recorded.append(line)
                    if middle.meddle is not None and not line.startswith(b"{"):
                        lines = middle.meddle(line)
                        middle.meddle = None
                writer.writelines(lines)
        writer.close()


@contextlib.asynccontextmanager
async def with_middle() -> AsyncIterator[tuple[Node, Node, Middle]]:
    sockets = listeners(2)
    peers = peers_of(sockets)
    middle = Middle(peers[0])
    server = await asyncio.start_server(middle.carry, "127.0.0.1", 0)
    zero = await Node(0, peers, sockets[0]).start()
    around = Peer(0, "host-0", "127.0.0.1", server.sockets[0].getsockname()[1])
    one = await Node(1, [around, peers[1]], sockets[1]).start()
    yield zero, one, middle
    server.close()
    for node in (zero, one):
        await node.close()
    for each in sockets:
        each.close()
    await until(lambda: len(asyncio.all_tasks()) == 1, "a task is left")


def test_lines_cannot_be_changed_repeated_left_out_or_added_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "RETRY_S", 0.05)

    async def run() -> None:
        async with with_middle() as (zero, one, middle):
            for number, (name, meddle) in enumerate(MEDDLING.items()):
                await until_all_talk([zero, one])
                middle.meddle = meddle
                await until(
                    lambda n=number: zero.network.refused[frames.WRONG_SEAL] == n + 1,
                    f"{name}: taken",
                )
            await until_all_talk([zero, one])
            assert all(set(message) == {"from", "heartbeat_age_s"} for message in zero.heard[1])
            # All of an earlier conversation, again: the listener's number is another one now.
            reader, writer = await asyncio.open_connection(
                zero.peers[0].address, zero.peers[0].port
            )
            writer.writelines(middle.recorded[:10])
            assert b"proof" not in await reader.read()
            await until(
                lambda: zero.network.refused[handshake.WRONG_SECRET] == 1,
                "a recording was believed",
            )
            writer.close()

    asyncio.run(run())


async def join(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Session]:
    """As node 1, with the secret."""
    reader, writer = await asyncio.open_connection(peer.address, peer.port)
    dialled = handshake.dial(SECRET, "watch", 1, 0)
    word: Message | None = next(dialled)
    while True:
        writer.write(json.dumps(word).encode() + b"\n")
        try:
            word = dialled.send(json.loads(await reader.readline()))
        except StopIteration as done:
            agreed: Agreed = done.value
            return reader, writer, agreed.session


def sealed(session: Session, text: bytes) -> bytes:
    line = frames._seal(session._send_key, session._num_sent, text) + b" " + text + b"\n"
    session._num_sent += 1
    return line


WRONG = {
    b"[1]": NO_JSON,
    b"3": NO_JSON,
    b'{"cpu": NaN}': NO_JSON,
    b'{"cpu": -Infinity}': NO_JSON,
    b"[" * 500_000: NO_JSON,
    b'{"a":' * 100_000: NO_JSON,
    b'{"a": "' + b"x" * frames.MAX_BYTES + b'"}': TOO_LONG,
}


def test_one_that_knows_the_secret_is_cut_off_too_for_what_is_no_message() -> None:
    async def run() -> None:
        (listener,) = listeners(1)
        me = peers_of([listener])[0]
        zero = await Node(0, [me, Peer(1, "b", "127.0.0.2", 1)], listener).start()
        for text, why in WRONG.items():
            before = zero.network.refused[why]
            reader, writer, session = await join(me)
            writer.write(sealed(session, text))
            await until(
                lambda b=before, w=why: zero.network.refused[w] == b + 1,
                f"{text[:20]!r}: not {why}",
            )
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
        reader, writer, session = await join(me)
        writer.write(session.encode({"fine": True}))
        await until(lambda: zero.heard == {1: [{"fine": True}]}, "what is right is not taken")
        writer.close()
        await zero.close()
        listener.close()

    asyncio.run(run())


def test_a_flood_does_not_keep_nodes_out() -> None:
    """The newest connection is always kept; hosts of the run do not even share their limit with
    other clients."""
    (listener,) = listeners(1)
    owner = Node(0, peers_of([listener]), listener).network

    def line(address: str) -> PeerConnection:
        made = PeerConnection(owner, handshake.answer(SECRET, "watch", 0, {1}), is_ours=False)
        made.address = address
        return made

    pending = PendingConnections({"10.0.0.1"})
    peer = line("10.0.0.1")
    pending.add(peer)
    crowd = [line(f"192.0.2.{number % 250}") for number in range(500)]
    for stranger in crowd:
        pending.add(stranger)
        assert not stranger.why, "the newest is in"
    assert len(pending) == MAX_PENDING + 1
    assert not peer.why
    assert [stranger.why for stranger in crowd] == [CROWDED] * (500 - MAX_PENDING) + [
        ""
    ] * MAX_PENDING
    pending.remove(peer)
    pending.remove(peer)
    assert len(pending) == MAX_PENDING
    owner._acceptor._listener.close()
    listener.close()


def test_without_file_descriptors_new_callers_wait_and_open_connections_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "ACCEPT_PAUSE_S", 0.3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            acceptor = zero.network._acceptor
            with socket.socket() as call:
                call.setblocking(False)
                lowest_free = os.dup(0)
                os.close(lowest_free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
                try:
                    await asyncio.get_running_loop().sock_connect(call, zero.listener.getsockname())
                    await until(lambda: acceptor._pause, "it was taken without a file")
                    await until_all_talk([zero, one])
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await until(lambda: len(zero.network._pending), "it was never taken")

    asyncio.run(run())


# Three sidecars in a process of their own, one of which is started only when it is told.
HOST = """
import asyncio, json, os, sys
from drumline.net import connection
from tests.unit.watch.sidecar.networks import Node, listeners, peers_of, until_all_talk

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

async def main():
    connection.HANDSHAKE_S = 1.0
    sockets = listeners(3)
    peers = peers_of(sockets)
    zero, one = [await Node(me, peers, sockets[me]).start() for me in (0, 1)]
    zero.network.peers.pop(2), one.network.peers.pop(2)
    await until_all_talk([zero, one])
    first, before = zero.network._connections[1], resident()
    print(json.dumps(sockets[0].getsockname()), flush=True)
    loop = asyncio.get_running_loop()
    while word := await loop.run_in_executor(None, sys.stdin.readline):
        if word == "join\\n":
            two = await Node(2, peers, sockets[2]).start()
            await until_all_talk([two])
        await until_all_talk([zero, one])
        print(json.dumps({
            "grown": resident() - before, "is_same_line": zero.network._connections.get(1) is first,
            "waiting": len(zero.network._pending), "refused": zero.network.refused,
        }), flush=True)

asyncio.run(main())
"""


class Target:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.address: tuple[str, int] = tuple(json.loads(process.stdout.readline()))

    def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=30)


def test_floods_idle_crowds_and_slow_messages_do_not_disturb() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=pipe, stdout=pipe, text=True
    ) as process:
        target = Target(process)
        with contextlib.ExitStack() as stack:
            for _ in range(3):  # 100 MB without an end of line
                with contextlib.suppress(OSError), target.call() as call:
                    for _ in range(100):
                        call.sendall(b"x" * (1 << 20))
            crowd = [stack.enter_context(target.call()) for _ in range(500)]
            for connection in crowd[-20:]:  # one letter at a time
                with contextlib.suppress(OSError):
                    connection.sendall(b"{")
            answer = target.ask("join")
            assert answer["is_same_line"]
            assert answer["waiting"] <= 2 * MAX_PENDING
            for _ in range(8):
                for connection in crowd[-20:]:
                    with contextlib.suppress(OSError):
                        connection.sendall(b'"')
                time.sleep(0.2)
            answer = target.ask("again")
        assert answer["is_same_line"], "a line between sidecars broke"
        assert answer["refused"].keys() == {frames.TOO_LONG, LATE, CROWDED}
        assert answer["waiting"] == 0, "slow words bought more time"
        assert answer["grown"] < 8 << 20, f"{answer['grown'] / 1e6:.1f} MB"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
