"""Files of datasets that are bombs: no code runs, no memory is taken that the file does not fill,
and nothing hangs."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from drumline.base.errors import DataError
from drumline.data.cifar10 import cifar10, read_python_batch
from drumline.data.tokens import tokens
from tests.attacks.limits import bounded

FRAME = b"\x95"
LENGTH_8 = struct.pack("<Q", 2**40)
LENGTH_4 = struct.pack("<I", 2**31 - 1)


BOMBS = {
    "a memo of two billion": b"\x80\x02]r" + LENGTH_4 + b".",
    "bytes of a terabyte": b"\x80\x04\x8e" + LENGTH_8 + b".",
    "text of a terabyte": b"\x80\x04\x8d" + LENGTH_8 + b".",
    "bytes of two gigabytes": b"\x80\x02T" + LENGTH_4 + b".",
    "a frame of a terabyte": b"\x80\x04" + FRAME + LENGTH_8 + b"X" + LENGTH_4 + b".",
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
    with (
        bounded(),
        pytest.raises(
            DataError, match=r"batch: the file|is damaged or not|is not a valid"
        ) as caught,
    ):
        read_python_batch(tmp_path / "batch")
    assert "MemoryError" not in str(caught.value)


def test_a_fifo_and_an_endless_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with bounded(), pytest.raises(DataError, match="not a regular file"):
            read_python_batch(path)


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_1.bin"])
def test_a_sparse_file_is_refused(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(3073 << 30)
    with (
        bounded(),
        pytest.raises(
            DataError,
            match=rf"{name} is .*(\(OSError: .*more than 67,108,864 bytes|67,108,864 bytes at most)",
        ),
    ):
        cifar10(split="train", dir=str(tmp_path), augment=False)


SHAPES = [(10**30,), (2**62, 2**62), (-1,), (10**290,), (2**61,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_npy_file_of_a_huge_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    (path := tmp_path / "corpus.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    )
    with (
        bounded(),
        pytest.raises(
            DataError,
            match=r"corpus.npy cannot be mapped as a .npy file \(|corpus.npy holds|too short",
        ),
    ):
        tokens(split="train", dir=str(path), token_type="uint16", context=8)
