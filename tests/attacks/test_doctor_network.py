"""`drumline doctor` without ssh: a false node 0, or somebody between the hosts, gets no port, no
scan and no answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.base.errors import DrumlineError, ExitCode, PreflightError, UsageError
from drumline.base.job_secret import secret_from
from drumline.cli import main
from drumline.launch.hosts import Host
from drumline.launch.ssh.host_connection import HostConnection
from drumline.net.frames import FrameError, FrameReader, Session, decode, encode
from drumline.net.handshake import Agreed, answer
from drumline.net.interfaces import Interface
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs.examination import NodeClient, NodeLostError
from drumline.tools.doctor.pairs.node_server import PROTOCOL, NodeServer
from drumline.tools.doctor.pairs.without_ssh import NodeOptions, join

SECRET = "a secret of more than sixteen letters"
OWN = "192.0.2.7"
TOKEN = "00" * 16
HELLO = {"kind": "hello", "protocol": PROTOCOL}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> NodeServer:
    """One that came to node 0 over a network, and has two addresses."""
    interfaces = [Interface("lo", "127.0.0.1", 65536, True), Interface("eth0", OWN, 1500, True)]
    monkeypatch.setattr("drumline.tools.doctor.pairs.node_server.interfaces", lambda: interfaces)
    return NodeServer(FrameReader(0), 1, HostSettings({}), here=OWN)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "", "::", "127.0.0.1", "127.0.0.2", "192.0.2.8", "localhost"]
)
def test_a_false_master_chooses_no_address_to_listen_on(node: NodeServer, address: str) -> None:
    request = {"token": TOKEN, "node": 1, "address": address, "ports": 1, "other_addresses": []}
    share = {
        "first_rank": 0,
        "num_procs": 1,
        "world_size": 2,
        "port": 1,
        "limit_s": 1.0,
        "backend": "gloo",
    }
    for action, message in (
        (node._listen, request),
        (node._listen, {**request, "address": OWN, "other_addresses": [address]}),
        (node._collectives, {**share, "address": address}),
    ):
        with pytest.raises(
            PreflightError, match="is not an address of this host that others reach"
        ):
            action(message)
    for wrong in ({"first_rank": -1}, {"world_size": 0}, {"port": 0}):
        with pytest.raises(ValueError, match=f"Expected `int` .* at `\\$.{next(iter(wrong))}`"):
            node._collectives({**share, **wrong, "address": address})
    assert node.listeners is None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",
        "::1",
        OWN,
        "localhost",
        "224.0.0.1",
        "::ffff:127.0.0.1",
        f"::ffff:{OWN}",
        "fe80::1",
    ],
)
def test_a_false_master_does_not_scan_what_only_the_host_itself_reaches(
    node: NodeServer, address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own_service:
        own_service.setblocking(False)
        target = {"node": 0, "address": address, "port": own_service.getsockname()[1]}
        node._token = lambda: bytes(16)  # type: ignore[method-assign]
        assert node._probe({"targets": [target]}) == [{"outcome": "no route to host"}]
        with pytest.raises(PreflightError, match="is not an address of another host"):
            node._measure({"target": target, "seconds": 0.1})
        with pytest.raises(BlockingIOError):
            own_service.accept()


def test_nodes_on_one_machine_and_hosts_over_ssh_are_not_limited() -> None:
    for here in ("127.0.0.1", None):
        server = NodeServer(FrameReader(0), 1, HostSettings({}), here=here)
        server._check_own("127.0.0.1")
        server._check_elsewhere("127.0.0.1")


def _joined(place: NodeOptions) -> str:
    try:
        join(place, HostSettings({}))
    except DrumlineError as error:
        return error.what
    return "welcome"


@pytest.mark.parametrize(
    "line", [b'{"id": 1, "kind": "facts"}\n', b"0" * 64 + b' {"id": 1, "kind": "facts"}\n']
)
def test_a_line_that_was_put_in_after_the_handshake_is_not_answered(line: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        place = NodeOptions(1, 2, "127.0.0.1", listener.getsockname()[1], SECRET, 20.0)
        telling = pool.submit(_joined, place)
        call, _ = listener.accept()
        with call, call.makefile("rb") as lines:
            handshake = answer(SECRET.encode(), "doctor", 0, {1})
            next(handshake)
            call.sendall(encode(handshake.send(decode(lines.readline())) or {}) + b"\n")
            with pytest.raises(StopIteration) as done:
                handshake.send(decode(lines.readline()))
            agreed: Agreed = done.value.value
            call.sendall(encode(agreed.last or {}) + b"\n")
            assert agreed.session.decode(lines.readline().removesuffix(b"\n")) == HELLO
            call.sendall(line)
            assert lines.readline() == b"", "nothing is said to who cannot seal"
            assert "received a line with a wrong seal" in telling.result()


@pytest.mark.parametrize("is_true", [True, False])
def test_an_answer_that_was_changed_on_the_way_ends_the_line(is_true: bool) -> None:
    async def ask() -> Any:
        near = Session(b"a", b"b")
        far = Session(b"b", b"a")
        one, other = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=one)
        far_reader, far_writer = await asyncio.open_connection(sock=other)
        client = NodeClient(
            HostConnection(Host("b"), [], 9.0, session=near, reader=reader, writer=writer)
        )
        far_writer.write(far.encode(HELLO))
        await client.open()
        asked = asyncio.create_task(client.ask("facts", 20.0))
        request: dict[str, Any] = {}
        while request.get("kind") != "facts":
            request = far.decode((await far_reader.readline()).removesuffix(b"\n"))
        line = far.encode({"kind": "answer", "id": request["id"], "ok": 1})
        far_writer.write(line if is_true else line.replace(b'"ok":1', b'"ok":2'))
        try:
            return await asked
        except NodeLostError as error:
            return error.what
        finally:
            with contextlib.suppress(FrameError):
                await client.close()
            far_writer.close()

    result = asyncio.run(ask())
    assert result == 1 if is_true else "wrong seal" in str(result)


@pytest.mark.parametrize("secret", ["x", "hunter2", "fifteen letters"])
def test_a_secret_that_can_be_guessed_is_refused(secret: str) -> None:
    with pytest.raises(UsageError) as caught:
        secret_from({"DRUMLINE_SECRET": secret})
    assert str(caught.value) == (
        f"DRUMLINE_SECRET has {len(secret)} characters; fewer than 16 can be guessed\n"
        "  try: export DRUMLINE_SECRET=$(openssl rand -hex 32) on one node, and set the same value on all others"
    )
    assert secret_from({"DRUMLINE_SECRET": ""}) is None
    assert secret_from({"DRUMLINE_SECRET": "sixteen letters!"}) == "sixteen letters!"


@pytest.mark.parametrize(
    "words",
    [
        "doctor --nodes 2 --node-rank 0 --master 127.0.0.1",
        "launch --nodes 2 --node-rank 1 --master a tests/ports.py",
    ],
)
def test_commands_refuse_it_before_they_open_anything(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "DRUMLINE_SECRET", "hunter2")
    assert main(words.split()) == ExitCode.USAGE
    printed = capsys.readouterr().err
    assert "DRUMLINE_SECRET has 7 characters" in printed
    assert "hunter2" not in printed


@given(
    st.binary(max_size=300) | st.text(max_size=100).map(lambda text: json.dumps([text]).encode())
)
def test_whatever_line_comes_is_a_message_or_an_error_with_a_name(line: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert isinstance(decode(line), dict)
    with pytest.raises(FrameError):
        Session(b"a", b"b").decode(line)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists),
    st.data(),
)
def test_whatever_a_master_asks_for_is_done_or_refused(value: object, data: st.DataObject) -> None:
    node = NodeServer(FrameReader(0), 1, HostSettings({}), here=OWN)
    messages: list[Any] = []
    node._send = lambda kind, **content: messages.append(content)  # type: ignore[method-assign]
    request = {
        "id": 1,
        "kind": data.draw(st.sampled_from(["listen", "probe", "measure", "collectives"])),
    }
    for name in (
        "token",
        "address",
        "ports",
        "other_addresses",
        "targets",
        "target",
        "first_rank",
        "node",
    ):
        request[name] = value
    node._answer(request)
    assert messages[0].keys() <= {"id", "ok", "error"}
    assert node.listeners is None
