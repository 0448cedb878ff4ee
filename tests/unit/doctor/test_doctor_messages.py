"""Messages: what is no message of ours is refused in a sentence, whatever it is; nothing is read past a limit."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.doctor.pairs.messages import (
    MAX_BYTES,
    Lines,
    MessageError,
    decode,
    encode,
    send,
    want,
    want_list,
)
from drumline.doctor.pairs.secret import proof
from drumline.net.handshake import is_proof, nonce


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"Welcome to node-a!", "what came is no JSON: b'Welcome to node-a!'"),
        (b"", "what came is no JSON: b''"),
        (b"[1, 2]", "what came is no JSON object: b'[1, 2]'"),
        (b"\xff\xfe", "what came is no JSON"),
        (b"[" * 100_000, "what came is no JSON"),
        (b" " * (MAX_BYTES + 1), f"a line of {MAX_BYTES + 1:,} bytes came, over the limit of 1,048,576"),
    ],
)
def test_junk_is_named(line: bytes, words: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode(line)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_ours(line: bytes) -> None:
    with contextlib.suppress(MessageError):
        assert isinstance(decode(line), dict)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(MessageError, match=r"a message of .* bytes is over the limit of 1,048,576"):
        encode({"text": "x" * MAX_BYTES})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({}, "port is None; int is needed"),
        ({"port": "80"}, "port is '80'; int is needed"),
        ({"port": True}, "port is True; int is needed"),
        ({"port": 70000}, "port is 70000; 1 to 65535 is allowed"),
    ],
)
def test_arguments_are_checked(message: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError) as caught:
        want(message, "port", int, 1, 65535)
    assert words == str(caught.value)


def test_lists_are_checked() -> None:
    assert want_list({"names": ["a"]}, "names", str, 2) == ["a"]
    with pytest.raises(MessageError, match="names has 3 entries; up to 2 are allowed"):
        want_list({"names": ["a", "b", "c"]}, "names", str, 2)
    with pytest.raises(MessageError, match="names is 7; str is needed"):
        want_list({"names": ["a", 7]}, "names", str, 2)


def test_lines_come_whole_one_by_one_and_end_with_the_sender() -> None:
    source, target = os.pipe()
    try:
        lines = Lines(source)
        send(target, {"number": 1})
        os.write(target, b'{"number": 2}\nand a half')
        assert decode(lines.next(5) or b"") == {"number": 1}
        assert decode(lines.next(5) or b"") == {"number": 2}
        assert lines.next(0.01) is None, "silence"
        os.close(target)
        target = -1
        assert lines.next(5) is None
    finally:
        os.close(source)
        if target >= 0:
            os.close(target)


def test_a_line_that_never_ends_is_not_kept() -> None:
    source, target = os.pipe()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(_write_all, target, b"x" * (MAX_BYTES + (1 << 20)))
        with pytest.raises(MessageError, match="a line of over 1,048,576 bytes came"):
            Lines(source).next(10)
        os.close(source)
        writing.result()
    os.close(target)


def _write_all(target: int, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while text:
            text = text[os.write(target, text) :]


def test_a_proof_is_of_one_side_one_node_and_one_meeting() -> None:
    nonces = (nonce(), nonce())
    mine = proof("secret", "node", nonces, 1, 4)
    assert is_proof(mine, proof("secret", "node", nonces, 1, 4))
    others = [
        proof("other", "node", nonces, 1, 4),
        proof("secret", "master", nonces, 1, 4),
        proof("secret", "node", nonces[::-1], 1, 4),
        proof("secret", "node", nonces, 2, 4),
        proof("secret", "node", nonces, 1, 3),
    ]
    assert not any(is_proof(mine, other) for other in others)
    assert not is_proof(None, mine)
    assert not is_proof("\u20ac", mine)
