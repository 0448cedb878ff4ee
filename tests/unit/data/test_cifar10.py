"""CIFAR-10: both versions of its files, read without running anything; a sentence for each way to
be wrong."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.base.errors import DataError
from drumline.data.cifar10 import cifar10
from drumline.data.sharding import Draws

PER_FILE = 3
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def content(number: int) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(number)
    images = generator.integers(0, 256, size=(PER_FILE, 3072)).astype(np.uint8)
    return images, generator.integers(0, 10, size=PER_FILE).tolist()


def python_2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2's cPickle wrote with protocol 2, opcode by opcode: its strings are bytes."""

    def text(value: bytes) -> bytes:
        return (
            b"U" + bytes([len(value)]) + value
            if len(value) < 256
            else b"T" + struct.pack("<i", len(value)) + value
        )

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    shape = b"".join(number(size) for size in images.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
        + b"\x87R"
    )
    array += b"(" + number(1) + shape + dtype + b"\x89" + text(images.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    named = (
        text(b"batch_label")
        + text(b"training batch 1 of 5")
        + text(b"labels")
        + listed
        + text(b"data")
        + array
    )
    return b"\x80\x02}(" + named + b"u."


def binary(images: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True)
    )


WRITERS = {"python 2": python_2_pickle, "binary": binary}


def write(folder: Path, writer: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".bin" if writer is binary else ""
    for number, name in enumerate(NAMES):
        (folder / f"{name}{suffix}").write_bytes(writer(*content(number)))
    return folder


def build(folder: Path | None, *, split: Any = "train", augment: bool = False) -> Any:
    return cifar10(split=split, dir=None if folder is None else str(folder), augment=augment)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_both_versions_are_read(tmp_path: Path, writer: Any) -> None:
    write(tmp_path, writer)
    train = build(tmp_path)
    evaluation = build(tmp_path, split="eval")
    assert (len(train), len(evaluation)) == (5 * PER_FILE, PER_FILE)
    assert (train.in_channels, train.num_classes) == (3, 10)
    expected = np.concatenate([content(number)[0] for number in range(5)]).reshape(-1, 3, 32, 32)
    images, labels = train.batch(np.arange(15), None)
    restored = (
        images * torch.tensor([63.0, 62.1, 66.7])[:, None, None]
        + torch.tensor([125.3, 123.0, 113.9])[:, None, None]
    )
    assert np.array_equal(restored.round().numpy().astype(np.uint8), expected)
    assert labels.tolist() == [label for number in range(5) for label in content(number)[1]]
    assert evaluation.batch(np.arange(3), None)[1].tolist() == content(5)[1]


@pytest.mark.parametrize("version", ["py", "bin"])
def test_the_folder_above_will_do(tmp_path: Path, version: str) -> None:
    write(tmp_path / f"cifar-10-batches-{version}", binary if version == "bin" else python_2_pickle)
    assert len(build(tmp_path)) == 15


def test_an_array_in_another_order_of_memory_is_read_as_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, python_2_pickle)
    images, labels = content(0)
    turned = python_2_pickle(
        np.frombuffer(images.tobytes("F"), np.uint8).reshape(images.shape), labels
    )
    (tmp_path / "test_batch").write_bytes(turned.replace(b"\x89T", b"\x88T"))
    batches = [
        build(tmp_path, split=split).batch(np.arange(PER_FILE), None) for split in ("eval", "train")
    ]
    assert torch.equal(batches[0][0], batches[1][0])


def test_augmentation_is_for_training_only(tmp_path: Path) -> None:
    write(tmp_path, binary)
    indices = np.arange(15)
    plain = build(tmp_path)
    augmented = build(tmp_path, augment=True)
    draws = Draws(0, 0, indices)
    assert torch.equal(plain.batch(indices, draws)[0], plain.batch(indices, None)[0])
    assert torch.equal(augmented.batch(indices, None)[0], plain.batch(indices, None)[0])
    assert not torch.equal(augmented.batch(indices, draws)[0], plain.batch(indices, None)[0])


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    write(tmp_path, python_2_pickle)
    trap = tmp_path / "trap"
    evil = pickle.dumps({"data": Malicious(trap), "labels": [0]}, protocol=protocol)
    (tmp_path / "data_batch_3").write_bytes(evil)
    with pytest.raises(
        DataError, match=r"data_batch_3: the file (asks for|uses) .*, which CIFAR-10's do not"
    ) as caught:
        build(tmp_path)
    assert "do not trust this file" in str(caught.value)
    assert not trap.exists()
    pickle.loads(evil)
    assert trap.exists()  # the trap would have worked


@pytest.mark.parametrize(
    "evil",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.",
        b"(S'true'\nios\nsystem\n.",
        b"cnumpy\nload\n.",
        b"cnumpy\ndtype.__init__\n.",
    ],
)
def test_no_way_to_name_a_function_gets_through(tmp_path: Path, evil: bytes) -> None:
    write(tmp_path, python_2_pickle)
    (tmp_path / "test_batch").write_bytes(evil)
    with pytest.raises(DataError, match="no code of it was run"):
        build(tmp_path, split="eval")


IMAGES, LABELS = content(0)


@pytest.mark.parametrize(
    ("damaged", "sentence"),
    [
        (b"", "is damaged or not a pickled batch of images"),
        (python_2_pickle(IMAGES, LABELS)[:5000], "is damaged or not a pickled batch of images"),
        (b"<html>404 not found</html>", "is damaged or not a pickled batch of images"),
        (
            pickle.dumps([1, 2], protocol=2),
            "expected images of 3072 bytes with a label each, found 0 bytes",
        ),
        (python_2_pickle(IMAGES[:, :100], LABELS), "found 300 bytes of pixels and 3 labels"),
        (
            python_2_pickle(IMAGES.astype(np.int32), LABELS),
            "found 36,864 bytes of pixels and 3 labels",
        ),
        (python_2_pickle(IMAGES, LABELS[:2]), "found 9,216 bytes of pixels and 2 labels"),
        (python_2_pickle(IMAGES[:0], []), "and 0 labels"),
        (python_2_pickle(IMAGES, LABELS).replace(b"labels", b"blabel"), "and 0 labels"),
        (python_2_pickle(IMAGES, [1, 2, 10]), "expected labels from 0 to 9, found 1 to 10"),
        (python_2_pickle(IMAGES, [1, -2, 3]), "expected labels from 0 to 9, found -2 to 3"),
        (
            python_2_pickle(IMAGES, []).replace(b"](e", b"](" + b"\x8a\x09aaaaaaaaa" * 3 + b"e"),
            r"\(OverflowError: ",
        ),
    ],
)
def test_a_malformed_python_file_is_reported(tmp_path: Path, damaged: bytes, sentence: str) -> None:
    write(tmp_path, python_2_pickle)
    (tmp_path / "test_batch").write_bytes(damaged)
    with pytest.raises(DataError, match=rf"test_batch[\s\S]*{sentence}"):
        build(tmp_path, split="eval")


@pytest.mark.parametrize("size", [0, 100, 3072, 3073 * 3 - 1])
def test_a_truncated_binary_file_is_reported(tmp_path: Path, size: int) -> None:
    write(tmp_path, binary)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        DataError,
        match=f"data_batch_2.bin .*expected records of 3073 bytes, and .* at most, found a size of {size} bytes",
    ):
        build(tmp_path)


def test_a_wrong_label_in_a_binary_file_is_reported(tmp_path: Path) -> None:
    write(tmp_path, binary)
    (tmp_path / "test_batch.bin").write_bytes(bytes([77]) + bytes(3072))
    with pytest.raises(DataError, match="expected labels from 0 to 9, found 77 to 77"):
        build(tmp_path, split="eval")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, binary)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(
        DataError, match=r"data_batch_4.bin is missing; other files of CIFAR-10 are there"
    ):
        build(tmp_path)


def test_a_folder_without_cifar_is_reported_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"there is no CIFAR-10 in .*: expected cifar-10-batches-py/data_batch_1"
    ) as caught:
        build(tmp_path)
    assert "--data.dir" in str(caught.value)


def test_no_folder_at_all_is_reported() -> None:
    with pytest.raises(DataError, match=r"cifar10 needs --data.dir, which is not set"):
        build(None)
