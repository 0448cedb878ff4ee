"""Without ssh: which nodes may join, which may not and why, and what a node reports that cannot
connect."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from drumline.base.errors import DrumlineError, UsageError
from drumline.net.frames import encode
from drumline.net.handshake import nonce
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs.node_server import PROTOCOL
from drumline.tools.doctor.pairs.without_ssh import DoctorRendezvous, NodeOptions, join, listen
from tests.ranks import free_port

SETTINGS = HostSettings({})


def place(
    node: int, *, nodes: int = 2, secret: str | None = None, wait_s: float = 20.0, port: int = 0
) -> NodeOptions:
    return NodeOptions(node, nodes, "127.0.0.1", port, secret, wait_s)


def refused(master: NodeOptions, *nodes: NodeOptions) -> list[str]:
    """What each node that tries to join gets as an answer."""
    port = free_port()
    master = replace(master, port=port)

    async def host() -> list[str]:
        rendezvous = DoctorRendezvous(master)
        waiting = asyncio.create_task(rendezvous.wait(lambda _: None))
        telling = asyncio.gather(
            *(asyncio.to_thread(_told, replace(node, port=port)) for node in nodes)
        )
        await asyncio.wait({waiting, telling}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for client in rendezvous.joined.values():
            await client.connection.close()
        return list(await telling)

    return asyncio.run(host())


def _told(node: NodeOptions) -> str:
    try:
        join(node, SETTINGS)
    except DrumlineError as error:
        return error.what
    return "welcome"


@pytest.mark.parametrize(
    ("master", "node", "words"),
    [
        (None, "one", "node 0 refuses node 1: DRUMLINE_SECRET is set on node 1 and not on node 0"),
        ("one", None, "node 0 refuses node 1: DRUMLINE_SECRET is set on node 0 and not on node 1"),
        (
            "one",
            "two",
            "node 0 refuses node 1: DRUMLINE_SECRET of node 1 differs from that of node 0",
        ),
    ],
)
def test_secrets_that_do_not_fit(master: str | None, node: str | None, words: str) -> None:
    assert refused(place(0, secret=master), place(1, secret=node)) == [words]


def test_numbers_that_do_not_fit() -> None:
    messages = refused(place(0, nodes=3), place(1, nodes=4), place(0, nodes=3))
    assert messages == [
        "node 0 refuses node 1: it has --nodes 4, node 0 has 3",
        "node 0 refuses node 0: there is a node 0 already",
    ]


def test_valid_nodes_join_and_are_informed_when_node_0_leaves() -> None:
    (message,) = refused(place(0, secret="one"), place(1, secret="one"))
    assert "closed the connection before the end" in message


def test_an_end_without_a_result_is_not_the_end_of_the_check() -> None:
    port = free_port()

    async def host() -> str:
        rendezvous = DoctorRendezvous(place(0, port=port))
        telling = asyncio.create_task(asyncio.to_thread(_told, place(1, port=port)))
        await rendezvous.wait(lambda _: None)
        # As a connection sends it to a node without a heartbeat.
        rendezvous.joined[1].connection.send({"kind": "end", "grace_s": 0})
        return await telling

    assert "closed the connection before the end" in asyncio.run(host())


def test_a_node_that_waits_longer_than_its_lease_stays_and_one_that_left_may_join_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drumline.tools.doctor.pairs.node_server.SILENCE_S", 1.0)
    monkeypatch.setattr("drumline.tools.doctor.pairs.without_ssh.PROGRESS_S", 0.1)
    port = free_port()
    stays = place(1, nodes=4, port=port)
    leaves = place(2, nodes=4, port=port)

    async def come_and_go() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        hello = {
            "drumline": "doctor",
            "node": 2,
            "to": 0,
            "nodes": 4,
            "nonce": nonce(),
            "secret": False,
        }
        writer.write(encode(hello) + b"\n")
        assert "nonce" in json.loads(await reader.readline())
        writer.write(
            encode({"proof": None})
            + b"\n"
            + encode({"kind": "hello", "protocol": PROTOCOL})
            + b"\n"
        )
        assert json.loads(await reader.readline()) == {"proof": None}
        while 2 in rendezvous.missing():
            await asyncio.sleep(0.01)
        assert "there is a node 2 already" in await asyncio.to_thread(_told, leaves)
        writer.close()
        while 2 not in rendezvous.missing():
            await asyncio.sleep(0.01)

    async def host() -> list[int]:
        waiting = asyncio.create_task(rendezvous.wait(lambda _: None))
        await asyncio.sleep(0)
        messages = [asyncio.create_task(asyncio.to_thread(_told, stays))]
        await come_and_go()
        messages.append(asyncio.create_task(asyncio.to_thread(_told, leaves)))
        await asyncio.sleep(1.2)
        missing = rendezvous.missing()
        waiting.cancel()
        for client in rendezvous.joined.values():
            await client.connection.close()
        assert all(
            "closed the connection before the end" in message
            for message in await asyncio.gather(*messages)
        )
        return missing

    rendezvous = DoctorRendezvous(place(0, nodes=4, port=port))
    assert asyncio.run(host()) == [3]


def test_an_unknown_client_at_the_port_does_not_disturb() -> None:
    port = free_port()

    async def host() -> list[int]:
        rendezvous = DoctorRendezvous(place(0, port=port))
        waiting = asyncio.create_task(rendezvous.wait(lambda _: None))
        await asyncio.sleep(0)
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"node": "1"}\n', b"\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text)
            assert await reader.read() == b""
            writer.close()
        waiting.cancel()
        return rendezvous.missing()

    assert asyncio.run(host()) == [1]


def test_a_master_that_is_not_drumline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        telling = pool.submit(_told, place(1, port=listener.getsockname()[1]))
        call, _ = listener.accept()
        with call:
            call.sendall(b"220 mail.example ESMTP\r\n")
            assert "is not drumline's doctor" in telling.result()


def test_a_master_that_does_not_know_the_secret_it_claims_to_have() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        telling = pool.submit(_told, place(1, secret="one", port=listener.getsockname()[1]))
        call, _ = listener.accept()
        with call:
            call.sendall(encode({"nonce": nonce()}) + b'\n{"proof": "00"}\n')
            assert "does not know DRUMLINE_SECRET" in telling.result()


def test_a_node_reports_that_nothing_listens_and_that_a_name_does_not_resolve() -> None:
    here = socket.gethostname()
    port = free_port()
    message = _told(place(1, port=port, wait_s=0.1))
    assert message == (
        f"node 1 on {here} could not connect to 127.0.0.1:{port} within 0.1 s: connection refused (nothing listens "
        "there yet)"
    )
    nowhere = replace(place(1, port=port, wait_s=0.1), master="no-such-host.invalid")
    assert "the name does not resolve" in _told(nowhere)


def test_a_node_says_itself_that_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.tools.doctor.pairs.without_ssh.CONNECT_S", 0.3)
    # A listener whose queue is full does not answer, as a firewall that drops packets does not.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        fillers: list[socket.socket] = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        message = _told(place(1, port=port, wait_s=0.5))
        for filler in fillers:
            filler.close()
    assert f"could not connect to 127.0.0.1:{port} within 0.5 s: no answer" in message


def cannot_listen(where: NodeOptions) -> str:
    with pytest.raises(DrumlineError) as caught:
        listen(where).close()
    return str(caught.value)


def test_where_node_0_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = cannot_listen(place(0, port=port))
        assert f"node 0 cannot listen at --master 127.0.0.1:{port} on " in message
        assert "Address already in use" in message
        assert f"ss -ltnp 'sport = :{port}' shows the process that has it" in message
    far = replace(place(0, port=port), master="192.0.2.1")
    assert "Cannot assign requested address" in cannot_listen(far)
    unknown = cannot_listen(replace(far, master="no-such-host.invalid"))
    assert "node 0 cannot listen at --master no-such-host.invalid" in unknown


def test_a_name_that_leads_to_the_loopback_is_no_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def debian(*_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    message = cannot_listen(replace(place(0), master="node-a"))
    assert "--master node-a resolves to 127.0.1.1" in message
    assert "which no other host reaches" in message


def test_a_rank_out_of_range() -> None:
    with pytest.raises(
        UsageError,
        match=r"--node-rank is 2 of --nodes 2\n  try: give each node a number from 0 to 1",
    ):
        place(2)
