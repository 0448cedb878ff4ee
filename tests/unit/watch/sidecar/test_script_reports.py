"""The reports of scripts on their way to other sidecars: heartbeats come first, and what is too
long is dropped."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from drumline.net.connection import PeerConnection
from drumline.net.frames import MAX_BYTES
from drumline.watch.sidecar.local_ranks import ScriptReports
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from tests.unit.watch.sidecar.networks import Node, nodes, until, until_all_talk


def reports_of(folder: Path, node: Node) -> ScriptReports:
    options = SidecarOptions(
        folder=str(folder),
        owns_folder=False,
        node=node.me,
        host="host-0",
        ranks=(0, 1, 2),
        world_size=6,
        peers=tuple(peer for peer in node.peers if peer.node != node.me),
    )
    return ScriptReports(options)


def write(folder: Path, rank: int, report: Any) -> None:
    (folder / f"rank-{rank:05d}.script").write_text(json.dumps(report))


def reports_received(node: Node) -> list[tuple[int, int]]:
    return [
        (message["rank"], len(message["report"]))
        for message in node.heard.get(0, [])
        if message.get("kind") == "script"
    ]


def test_a_report_that_is_too_long_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            reports = reports_of(tmp_path, zero)
            write(tmp_path, 1, "x" * MAX_BYTES)
            assert [rank for rank, _ in reports.update(zero.network)] == [1], (
                "this node compares it"
            )
            assert list(reports.update(zero.network)) == []
            write(tmp_path, 1, "y" * MAX_BYTES)
            assert [rank for rank, _ in reports.update(zero.network)] == [1]
            write(tmp_path, 0, "short")
            list(reports.update(zero.network))
            await until(lambda: reports_received(one), "no report came")
            await until_all_talk([zero, one])
            assert reports_received(one) == [(0, 5)]

    with caplog.at_level(logging.WARNING, "drumline"):
        asyncio.run(run())
    (warning,) = caplog.records
    text = "a report of rank 1 to node 1 was not sent: a frame of 1,048,6"
    assert warning.getMessage().startswith(text)


def test_reports_leave_room_for_heartbeats(tmp_path: Path) -> None:
    """Three long reports for a peer that reads nothing for a while: two of them would fill its
    line."""
    long = MAX_BYTES - 1026

    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            reports = reports_of(tmp_path, zero)
            line = one.network._connections[0]
            _transport(line).pause_reading()
            # The kernel would take megabytes.
            sending = _transport(zero.network._connections[1])
            sending.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            for rank in range(3):
                write(tmp_path, rank, "x" * long)
            for _ in range(20):
                list(reports.update(zero.network))
                assert zero.network.send(1, {"kind": "heartbeat"}), "a heartbeat was refused"
                assert sending.get_write_buffer_size() < 1.5 * long
            _transport(line).resume_reading()
            await until(
                lambda: list(reports.update(zero.network)) or len(reports_received(one)) == 3,
                "not all reports came",
            )
            assert sorted(reports_received(one)) == [(rank, long) for rank in range(3)]

    asyncio.run(run())


def _transport(line: PeerConnection) -> asyncio.Transport:
    assert line._transport is not None
    return line._transport
