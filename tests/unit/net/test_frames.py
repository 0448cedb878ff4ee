"""Frames: a line that is none is refused with an error that shows it; nothing is read past a
limit."""

from __future__ import annotations

import contextlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.net.frames import (
    MAX_BYTES,
    FrameError,
    FrameReader,
    FrameWriter,
    LineBuffer,
    Session,
    decode,
    encode,
    write_all,
)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"Welcome to node-a!", "received what is not JSON: b'Welcome to node-a!'"),
        (b"", "received what is not JSON: b''"),
        (b"[1, 2]", "received what is not a JSON object: b'[1, 2]'"),
        (b"\xff\xfe", "received what is not JSON"),
        (b"[" * 100_000, "received what is not JSON"),
        (b" " * (MAX_BYTES + 1), "received a line of more than 1,048,576 bytes, the limit"),
    ],
)
def test_junk_is_named(line: bytes, words: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(line)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_ours(line: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert isinstance(decode(line), dict)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(FrameError, match=r"a frame of .* bytes is over the limit of 1,048,576"):
        Session().encode({"text": "x" * MAX_BYTES})


def test_a_number_that_is_none_is_not_sent_nor_taken() -> None:
    assert decode(encode({"never": math.inf, "text": "NaN"})) == {"never": math.inf, "text": "NaN"}
    for number in (math.nan, -math.inf):
        with pytest.raises(FrameError, match="is not a number"):
            encode({"value": number})
        with pytest.raises(FrameError, match="is not a number"):
            decode(json.dumps({"value": number}).encode())


def test_lines_are_whole_one_by_one_and_end_with_the_sender() -> None:
    source, target = os.pipe()
    try:
        reader = FrameReader(source)
        write_all(target, Session().encode({"number": 1}))
        os.write(target, b'{"number": 2}\nand a half')
        assert reader.next(5) == {"number": 1}
        assert reader.next(5) == {"number": 2}
        assert reader.next(0.01) is None, "silence"
        os.close(target)
        target = -1
        assert reader.next(5) is None
    finally:
        os.close(source)
        if target >= 0:
            os.close(target)


def test_a_line_that_never_ends_is_not_kept() -> None:
    source, target = os.pipe()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(_write_all, target, b"x" * (MAX_BYTES + (1 << 20)))
        with pytest.raises(FrameError, match="received a line of more than 1,048,576 bytes"):
            FrameReader(source).next(10)
        os.close(source)
        writing.result()
    os.close(target)


def _write_all(target: int, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while text:
            text = text[os.write(target, text) :]


def test_lines_are_split_wherever_they_arrive_in_pieces() -> None:
    lines = LineBuffer(4)
    popped = []
    for byte in b"ab\n\nabcd\nabcdefg\nx":
        lines.add(bytes([byte]))
        while (line := lines.pop()) is not None:
            popped.append(line)
    assert popped == [b"ab", b"", b"abcd", b"abcde", b"fg"]
    assert lines.clear() == b"x"


def test_a_sealed_line_is_of_one_direction_and_one_place_in_it() -> None:
    sender = Session(b"a", b"b")
    receiver = Session(b"b", b"a")
    first, second = (sender.encode({"number": number}).removesuffix(b"\n") for number in (1, 2))
    for line in (second, first.replace(b"1}", b"3}"), first[65:], b""):
        with pytest.raises(FrameError, match="wrong seal"):
            receiver.decode(line)
    with pytest.raises(FrameError, match="wrong seal"):
        sender.decode(first)
    assert [receiver.decode(line) for line in (first, second)] == [{"number": 1}, {"number": 2}]
    with pytest.raises(FrameError, match="wrong seal"):
        receiver.decode(second)


def test_frames_wait_for_no_one_and_a_greeting_is_no_frame() -> None:
    reading, writing = os.pipe()
    reader = FrameReader(reading)
    writer = FrameWriter(writing)
    while writer.has_room():
        writer.send("lines", lines=["x" * 1000])
    assert not writer.is_empty()
    frames = []
    while not writer.is_empty():
        frames += reader.read()
        writer.flush()
    os.close(writing)
    frames += reader.read()
    assert reader.is_closed
    assert {frame["kind"] for frame in frames} == {"lines"}
    os.close(reading)


def test_a_greeting_is_skipped() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'Welcome to b\n[1]\n{"number": 1}\n{"kind": "beat"}\n{"kind"')
    reader = FrameReader(reading)
    assert reader.read() == [{"kind": "beat"}]
    assert not reader.is_closed
    os.close(writing)
    os.close(reading)


def test_a_broken_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = FrameWriter(writing)
    writer.send("beat")
    assert writer.is_empty()
    os.close(writing)
