"""A compromised host sends the controller arbitrary data: the controller continues with the
others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.launch.hosts import Host
from drumline.launch.ssh.host_connection import FORMS, HostConnection, _read_lines, decode_from_host
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.net.frames import MAX_PIPE_BYTES, Session
from drumline.watch.watch_folder import SidecarDiagnosis

WHOLE: dict[str, dict[str, Any]] = {
    "hello": {"host": "a", "protocol": 3, "address": "10.0.0.1", "unknown_names": ["a"]},
    "refused": {"problems": [["no file", "copy it"]]},
    "started": {"ranks": [0], "world_size": 1, "start": 0, "restarts_left": 0},
    "diagnosis": {
        "alarm": "hang",
        "action": "stop",
        "sentence": "x",
        "was_printed": False,
        "is_last": True,
        "what": "x",
        "rank": None,
        "host": "a",
        "is_ranks_error": False,
    },
    "ended": {"code": 1, "last_lines": ["x"]},
    "progress": {"reached_step": 3, "counted_step": 0},
    "failed": {"rank": 0, "code": 1, "failed_at": 1.5, "restarts_left": 1, "last_lines": ["x"]},
    "lines": {"rank": None, "stream": "out", "lines": ["x"]},
    "heartbeat": {"number": 1, "now": 2.0},
    "answer": {"id": 1},
    "notice": {"text": "x"},
    "job": {"name": "x"},
}
WRONG = [None, "x", -1.5, True, [], {}, [[]], [None], ["x", 1], float("nan"), 10**400]


@contextlib.contextmanager
def host(heard: list[Any]) -> Iterator[tuple[HostConnection, Remote]]:
    """One as the controller knows it; what it says is not shown."""
    with Path(os.devnull).open("wb") as nowhere:
        screen = Screen(nowhere.fileno(), nowhere.fileno())
        connection = HostConnection(Host("a"), [], 10.0)
        remote = Remote(connection, {}, screen, lambda _, frame: heard.append(frame))
        connection.on_frame = remote._receive
        yield connection, remote
        screen.close()


def test_every_kind_of_frame_has_a_form() -> None:
    assert WHOLE.keys() == FORMS.keys()
    assert WHOLE["diagnosis"].keys() >= SidecarDiagnosis.__dataclass_fields__.keys()
    for kind, content in WHOLE.items():
        assert (
            decode_from_host(json.dumps({"kind": kind, **content}).encode(), Session()) is not None
        )


@pytest.mark.parametrize("kind", WHOLE)
def test_a_malformed_frame_is_no_frame(kind: str) -> None:
    heard: list[Any] = []
    with host(heard) as (connection, _):
        for name in WHOLE[kind]:
            missing = {key: value for key, value in WHOLE[kind].items() if key != name}
            wrong = [value for value in WRONG if type(value) is not type(WHOLE[kind][name])]
            for content in (missing, *({**WHOLE[kind], name: value} for value in wrong)):
                connection._receive(json.dumps({"kind": kind, **content}).encode())
        connection._receive(b'{"kind": "started", "ranks": ' + b"[" * 3000)
        connection._receive(b'{"kind": ["hello"]}')
    assert all(decode_from_host(json.dumps(frame).encode(), Session()) for frame in heard)
    assert not any(frame["kind"] != kind for frame in heard)


@given(
    st.sampled_from(sorted(WHOLE)),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists),
    st.data(),
)
def test_no_frame_ends_the_controller(kind: str, value: object, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WHOLE[kind])))
    with host([]) as (connection, remote):
        connection._receive(json.dumps({"kind": kind, **WHOLE[kind], name: value}).encode())
        remote.end_lines()


def test_a_line_without_an_end_is_not_kept() -> None:
    async def read() -> list[int]:
        stream = asyncio.StreamReader()
        for _ in range(MAX_PIPE_BYTES // (1 << 20) + 8):
            stream.feed_data(b"x" * (1 << 20))
        stream.feed_data(b"\nnext\n")
        stream.feed_eof()
        lengths: list[int] = []
        await _read_lines(stream, lambda line: lengths.append(len(line)))
        return lengths

    assert asyncio.run(read()) == [MAX_PIPE_BYTES + 1, (8 << 20) - 1, 4]
