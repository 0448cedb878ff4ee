"""The sidecars' network: which nodes are connected, how they reconnect, and how a lost one is
reported."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import subprocess
import sys

import pytest

from drumline.net.connection import MAX_UNSENT_BYTES
from drumline.net.frames import MAX_BYTES
from drumline.watch.sidecar import sidecar_network as timing
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
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


def test_lines_go_between_hubs_and_all_others() -> None:
    async def run() -> None:
        async with nodes(5) as five:
            await until_all_talk(five)
            assert [set(node.network.peers) for node in five] == [
                {1, 2, 3, 4},
                {0, 2, 3, 4},
                {0, 1, 3, 4},
                {0, 1, 2},
                {0, 1, 2},
            ]
            zero = five[0].network
            four = five[4].network
            assert not four.send(3, {}), "3 is no hub"
            assert not four.send(4, {})
            assert not four.send(99, {})
            assert all(age < 5 for age in zero.heartbeat_ages().values())
            assert {zero.connect_result(node) for node in range(5)} == {""}
            assert set(zero.heartbeat_ages()) == {1, 2, 3, 4}
            assert five[4].heard[0][-1]["from"] == 0
            assert not any(node.network.refused for node in five)

    asyncio.run(run(), debug=True)


def test_a_restarted_sidecar_reconnects_on_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "RETRY_S", 0.2)

    async def run() -> None:
        sockets = listeners(2)
        peers = peers_of(sockets)
        zero, one = [await Node(me, peers, sockets[me]).start() for me in range(2)]
        await until_all_talk([zero, one])
        await zero.close()
        await until(lambda: one.network.connect_result(0), "the end was not noticed")
        assert one.network.connect_result(0) == "closed by the other side"
        assert not one.network.send(0, {})
        zero = await Node(0, peers, sockets[0]).start()
        await until_all_talk([zero, one])
        assert one.network.connect_result(0) == ""
        # The one that dials; and without a farewell, so that the old line still looks alive to node
        # 0.
        await one.network._acceptor.close()
        again = await Node(1, peers, sockets[1]).start()
        await until_all_talk([zero, again])
        await until(
            lambda: one.network.connect_result(0), "the older line was kept beside the newer one"
        )
        for each in (zero, one, again):
            await each.close()
        for each in sockets:
            each.close()

    asyncio.run(run())


def test_it_is_reported_how_a_node_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RETRY_S", 0.1),
        ("PROBE_AFTER_S", 0.3),
        ("CHECK_S", 0.1),
        ("CLOSE_AFTER_S", 2.0),
    ):
        monkeypatch.setattr(timing, name, value)

    async def run() -> None:
        async with nodes(3) as (zero, one, two):
            await until_all_talk([zero, one, two])
            # Its process stands still: the kernel takes connections for it. Seen by the one it
            # dials, and by the other.
            for each in (zero, two):
                await each.close()
            silent = [
                await Node(each.me, one.peers, each.listener).start(pulses=False)
                for each in (zero, two)
            ]
            for node in (0, 2):
                await until(
                    lambda node=node: (
                        one.network.connect_result(node) == "accepts connections but does not reply"
                    ),
                    f"node {node}: {one.network.connect_result(node)!r}",
                )
            assert one.network.send(2, {}), "the line itself is still there"
            assert one.network.heartbeat_ages()[2] < 15
            await until(
                lambda: not one.network.send(2, {}) or not one.network.send(0, {}), "never broken"
            )
            for each in silent:
                await each.close()

    asyncio.run(run())


def test_nobody_there_is_refused_and_never_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PROBE_AFTER_S", 0.2)
    monkeypatch.setattr(timing, "CHECK_S", 0.1)

    async def run() -> None:
        sockets = listeners(3)
        peers = peers_of(sockets)
        for one in (0, 2):
            sockets[one].close()
        node = await Node(1, peers, sockets[1]).start()
        for peer in (0, 2):
            await until(lambda peer=peer: node.network.connect_result(peer), "nothing is said")
            assert node.network.connect_result(peer) == "connection refused"
        assert node.network.heartbeat_ages() == {}
        assert 0 < node.network.open_s() < 60
        await node.close()
        await node.close()
        sockets[1].close()

    asyncio.run(run())


def test_a_full_connection_drops_messages_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            chunk = {"text": "x" * (MAX_BYTES - 100)}
            sent = 0
            # nothing is read meanwhile: this loop never lets anybody else run
            while zero.network.send(1, chunk):
                sent += 1
                assert sent < 200
            assert sent * MAX_BYTES > MAX_UNSENT_BYTES
            assert not zero.network.send(1, {"small": 1}), (
                "order is kept: nothing overtakes what was dropped"
            )
            await until(
                lambda: sum("text" in one for one in one.heard[0]) == sent,
                "what was taken did not arrive",
            )
            await until(lambda: zero.network.send(1, {"small": 2}), "it did not go on")
            await until(lambda: {"small": 2} in one.heard[0], "it did not arrive")
            for message, why in (
                ({"text": "x" * MAX_BYTES}, "a frame of"),
                ({"cpu": math.nan}, "NaN is not a number"),
            ):
                zero.network.send(1, message)
                assert f"a message to node 1 was not sent: {why}" in caplog.text
            assert zero.network.send(1, {"text": "NaN is a word here"})
            with pytest.raises(TypeError):
                zero.network.send(1, {"what": object()})
            await until_all_talk([zero, one])

    asyncio.run(run())


def test_an_error_in_what_takes_messages_breaks_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            line = one.network._connections[0]
            take, one.network._on_message = one.network._on_message, lambda *_: 1 / 0
            await until(
                lambda: "a message of node 0 could not be handled" in caplog.text, "not told"
            )
            one.network._on_message = take
            await until_all_talk([zero, one])
            assert one.network._connections[0] is line

    caplog.set_level(logging.ERROR, logger="drumline")
    asyncio.run(run())


def test_closing_while_others_connect_leaves_nothing() -> None:
    async def run() -> None:
        for turns in range(12):  # of the event loop, between their calls and our end
            sockets = listeners(4)
            peers = peers_of(sockets)
            four = [await Node(me, peers, one).start() for me, one in enumerate(sockets)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for node in four:
                await node.close()
                assert not node.network._all_connections
            for connection in sockets:
                connection.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run(), debug=True)
    gc.collect()  # what was not closed would say so now


def test_alone_there_is_nothing_to_do() -> None:
    async def run() -> None:
        network = SidecarNetwork(
            me=0,
            peers=[Peer(0, "a", "127.0.0.1", 1)],
            secret=SECRET,
            on_message=print,
            listener=None,
        )
        await network.start()
        assert network.heartbeat_ages() == {}
        await network.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_the_network_does_not_load_torch() -> None:
    module = "drumline.watch.sidecar.sidecar_network"
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ)).returncode
        == 0
    )
