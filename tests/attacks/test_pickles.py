"""CIFAR-10 files that are bombs: no code runs, no memory is taken that the file does not fill, and nothing hangs."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from drumline.data.cifar10 import cifar10, load_arrays
from drumline.errors import DataError
from tests.attacks.limits import bounded

FRAME, LENGTH_8, LENGTH_4 = b"\x95", struct.pack("<Q", 2**40), struct.pack("<I", 2**31 - 1)


def hashed_for_ever(depth: int = 60) -> bytes:
    """A key that is a tuple of one tuple, twice, again and again: small in memory, endless to hash."""
    code = b"}(U\x01\x00)q\x00"
    for number in range(1, depth):
        code += b"U\x01" + bytes([number]) + bytes([ord("h"), number - 1]) * 2 + b"\x86q" + bytes([number])
    return code + bytes([ord("h"), depth - 1]) + b"K\x01u."


def nested_lists(width: int) -> bytes:
    """Labels that are a list of one list, again and again: width to the fifth numbers."""
    code = b"U\x01a](" + b"K\x01" * width + b"eq\x64"
    for number, name in enumerate((b"b", b"c", b"d", b"labels"), start=0x65):
        again = bytes([ord("h"), number - 1]) * width
        code += b"U" + bytes([len(name)]) + name + b"](" + again + b"eq" + bytes([number])
    return code


BOMBS = {
    "a memo of two billion": b"\x80\x02]r" + LENGTH_4 + b".",
    "bytes of a terabyte": b"\x80\x04\x8e" + LENGTH_8 + b".",
    "text of a terabyte": b"\x80\x04\x8d" + LENGTH_8 + b".",
    "bytes of two gigabytes": b"\x80\x02T" + LENGTH_4 + b".",
    "a frame of a terabyte": b"\x80\x04" + FRAME + LENGTH_8 + b"X" + LENGTH_4 + b".",
    "a key that is hashed for ever": hashed_for_ever(),
    "an integer of text": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
    "values used twice by DUP": b"\x80\x02]" + b"2" * 100 + b".",
    "a persistent id": b"\x80\x02Pname\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "an instance": b"(cos\nsystem\no.",
    "an object made anew": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "no end": b"\x80\x02" + b"]" * 100,
    "more lists than a batch has values": b"\x80\x02" + b"]" * 700_000 + b".",
    "more memory of one value than a batch has values": b"\x80\x02]" + b"\x94" * 700_000 + b".",
    "an empty stack": b".",
    "a list that is told to append itself": b"]q\x00h\x00a" + b"h\x00a" * 1000 + b".",
    "a mark that is not there": b"t.",
    "a name that does not end": b"c" + b"a" * 10_000_000,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused(tmp_path: Path, bomb: str) -> None:
    (tmp_path / "batch").write_bytes(BOMBS[bomb])
    with bounded(), pytest.raises(DataError, match=r"batch: the file|is damaged or not") as caught:
        load_arrays(tmp_path / "batch")
    assert "MemoryError" not in str(caught.value)


def test_text_that_becomes_bytes_again_and_again_is_refused(tmp_path: Path) -> None:
    text = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\x00"
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    (tmp_path / "batch").write_bytes(b"\x80\x02](" + text + again * 1000 + b"e.")
    with bounded(), pytest.raises(DataError, match="is damaged"):
        load_arrays(tmp_path / "batch")


def test_labels_that_would_grow_are_refused(tmp_path: Path) -> None:
    images = pickle.dumps(np.zeros((3, 3072), np.uint8), protocol=2)[2:-1]
    (tmp_path / "data_batch_1").touch()
    (tmp_path / "test_batch").write_bytes(b"\x80\x02}(U\x04data" + images + nested_lists(100) + b"u.")
    with bounded(), pytest.raises(DataError, match="expected labels that are integers"):
        cifar10(split="eval", dir=str(tmp_path), augment=False)


def test_a_fifo_and_an_endless_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with bounded(), pytest.raises(DataError, match="not a regular file"):
            load_arrays(path)
