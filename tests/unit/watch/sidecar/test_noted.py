"""The notes of ranks on their way to other sidecars: heartbeats come first, and what is too long is dropped."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from drumline.watch.sidecar.line import Line
from drumline.watch.sidecar.noted import MAX_NOTE_BYTES, Noted
from drumline.watch.sidecar.terms import Terms
from tests.unit.watch.sidecar.channels import Node, nodes, until, until_all_talk


def noted_of(folder: Path, node: Node) -> Noted:
    terms = Terms(
        folder=str(folder),
        owns_folder=False,
        node=node.me,
        host="host-0",
        ranks=(0, 1, 2),
        world_size=6,
        peers=tuple(peer for peer in node.peers if peer.node != node.me),
    )
    return Noted(terms)


def write(folder: Path, rank: int, note: Any) -> None:
    (folder / f"rank-{rank:05d}.notes").write_text(json.dumps(note))


def notes_heard(node: Node) -> list[tuple[int, int]]:
    return [(one["rank"], len(one["note"])) for one in node.heard.get(0, []) if one.get("kind") == "note"]


def test_a_note_that_is_too_long_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            noted = noted_of(tmp_path, zero)
            for length in (MAX_NOTE_BYTES, MAX_NOTE_BYTES + 1):
                write(tmp_path, 1, "x" * length)
                assert [rank for rank, _ in noted.look(zero.channel)] == [1], "this node compares it"
                assert list(noted.look(zero.channel)) == []
            write(tmp_path, 0, "short")
            list(noted.look(zero.channel))
            await until(lambda: notes_heard(one), "no note came")
            await until_all_talk([zero, one])
            assert notes_heard(one) == [(0, 5)]

    with caplog.at_level(logging.WARNING, "drumline"):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1: {MAX_NOTE_BYTES + 2} bytes about its script and its parameters are more than the {MAX_NOTE_BYTES} "
        "that sidecars send each other; it is not compared with the ranks of other nodes"
    ]


def test_notes_leave_room_for_heartbeats(tmp_path: Path) -> None:
    """Three long notes for a peer that reads nothing for a while: two of them would fill its line."""
    long = MAX_NOTE_BYTES - 2

    async def run() -> None:
        async with nodes(2) as (zero, one):
            await until_all_talk([zero, one])
            noted, line = noted_of(tmp_path, zero), one.channel._lines[0]
            _transport(line).pause_reading()
            # The kernel would take megabytes.
            sending = _transport(zero.channel._lines[1])
            sending.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            for rank in range(3):
                write(tmp_path, rank, "x" * long)
            for _ in range(20):
                list(noted.look(zero.channel))
                assert zero.channel.send(1, {"kind": "pulse"}), "a heartbeat was refused"
                assert sending.get_write_buffer_size() < 1.5 * long
            _transport(line).resume_reading()
            await until(
                lambda: list(noted.look(zero.channel)) or len(notes_heard(one)) == 3, "not all notes came"
            )
            assert sorted(notes_heard(one)) == [(rank, long) for rank in range(3)]

    asyncio.run(run())


def _transport(line: Line) -> asyncio.Transport:
    assert line._transport is not None
    return line._transport
