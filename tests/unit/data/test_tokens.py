"""Tokens for a language model: every kind of source, the windows cut from it, and a sentence for
each fault."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.base.errors import DataError
from drumline.data.tokens import TokenWindows, standard_library, tokens


def build(
    path: Path | None, *, split: Any = "train", token_type: str = "uint16", context: int = 4
) -> TokenWindows:
    return tokens(
        split=split, dir=None if path is None else str(path), token_type=token_type, context=context
    )


def everything(dataset: TokenWindows) -> list[int]:
    """The tokens of all windows in order."""
    inputs, targets = dataset.batch(np.arange(len(dataset)), None)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return torch.cat([inputs, targets[:, -1:]], dim=1).flatten().tolist()


@pytest.mark.parametrize("token_type", ["uint8", "uint16", "uint32"])
def test_a_raw_file_is_split_and_cut_into_windows(tmp_path: Path, token_type: str) -> None:
    numbers = np.arange(203) % 97
    numbers.astype(token_type).tofile(path := tmp_path / "corpus.bin")
    train = build(path, token_type=token_type)
    evaluation = build(path, split="eval", token_type=token_type)
    assert everything(train) == numbers[:190].tolist()  # 193 tokens are 38 windows of 5
    assert everything(evaluation) == numbers[193:203].tolist()
    assert train.vocab_size == evaluation.vocab_size == 97


def test_a_batch_is_two_contiguous_int64_tensors(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(path := tmp_path / "corpus.bin")
    inputs, targets = build(path).batch(np.array([2, 0]), None)
    assert inputs.tolist() == [[10, 11, 12, 13], [0, 1, 2, 3]]
    assert targets.tolist() == [[11, 12, 13, 14], [1, 2, 3, 4]]
    for tensor in (inputs, targets):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int32", "int64"])
def test_an_npy_file_knows_its_own_type(tmp_path: Path, kind: str) -> None:
    numbers = np.arange(200) % 50
    np.save(path := tmp_path / "corpus.npy", numbers.astype(kind))
    assert everything(build(path)) == numbers[:190].tolist()


def test_text_is_bytes(tmp_path: Path) -> None:
    (path := tmp_path / "book.text").write_bytes(
        text := b"The quick brown fox jumps over the lazy dog. " * 4
    )
    train = build(path)
    assert bytes(everything(train)) == text[:170]
    assert train.vocab_size == 256


def test_a_folder_of_text_is_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name, text in (
        ("b.txt", b"b" * 40),
        ("a.py", b"a" * 40),
        ("part/c.md", b"c" * 40),
        ("d.png", b"d" * 40),
    ):
        (tmp_path / name).write_bytes(text)
    assert bytes(everything(build(tmp_path))) == (b"a" * 40 + b"b" * 40 + b"c" * 40)[:110]


@pytest.mark.parametrize("evaluation", ["eval", "val"])
@pytest.mark.parametrize("ending", ["bin", "npy", "txt"])
def test_a_folder_may_hold_both_parts(tmp_path: Path, evaluation: str, ending: str) -> None:
    parts = {
        "train": np.arange(50, dtype=np.uint16),
        evaluation: np.arange(60, 80, dtype=np.uint16),
    }
    for name, numbers in parts.items():
        path = tmp_path / f"{name}.{ending}"
        if ending == "bin":
            numbers.tofile(path)
        elif ending == "npy":
            np.save(path, numbers)
        else:
            path.write_bytes(numbers.astype(np.uint8).tobytes())
    train = build(tmp_path)
    held_out = build(tmp_path, split="eval")
    assert everything(train) == list(range(50))
    assert everything(held_out) == list(range(60, 80))
    assert train.vocab_size == held_out.vocab_size == (256 if ending == "txt" else 80)


def test_a_training_file_without_an_evaluation_file_is_split(tmp_path: Path) -> None:
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "train.bin")
    assert everything(build(tmp_path, split="eval")) == list(range(190, 200))


def test_without_a_folder_it_is_the_source_of_the_standard_library() -> None:
    train = build(None, context=127)
    evaluation = build(None, split="eval", context=127)
    assert 40_000 < len(train) < 400_000
    assert len(train) == pytest.approx(19 * len(evaluation), rel=0.01)
    library = Path(sysconfig.get_path("stdlib"))
    text = bytes(everything(train))
    assert (library / "json" / "decoder.py").read_bytes() in text
    assert (library / "json" / "encoder.py").read_bytes() in text


def test_tests_and_installed_packages_are_no_part_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_files = ["email/parser.py", "json/decoder.py", "abc.py"]
    for name in [
        *library_files,
        "test/a.py",
        "json/tests/b.py",
        "site-packages/c.py",
        "dist-packages/d/e.py",
        "f.txt",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} " * 10)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    text = standard_library().values.tobytes().decode()
    assert text.split() == [name for name in sorted(library_files) for _ in range(10)]


def test_a_vocabulary_can_be_stated(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(path := tmp_path / "corpus.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 50257}))
    assert build(path).vocab_size == 50257
    (tmp_path / "meta.json").write_text(json.dumps({"made by": "me"}))
    assert build(path).vocab_size == 100


@pytest.mark.parametrize(("kind", "stray"), [("uint16", 70), ("int32", -3)])
def test_a_token_outside_the_stated_vocabulary_is_reported(
    tmp_path: Path, kind: str, stray: int
) -> None:
    numbers = np.arange(100) % 50
    numbers[42] = stray
    np.save(path := tmp_path / "corpus.npy", numbers.astype(kind))
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 50}))
    dataset = build(path)
    dataset.batch(np.arange(8), None)
    with pytest.raises(
        DataError, match=f"corpus.npy holds the token {stray}, but its vocabulary has 50"
    ):
        dataset.batch(np.array([8]), None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "meta.json cannot be read as a JSON object"),
        ("[1]", "meta.json cannot be read as a JSON object"),
        ('{"vocab_size": "many"}', "meta.json: vocab_size is 'many', expected a positive integer"),
        ('{"vocab_size": 0}', "meta.json: vocab_size is 0"),
        ('{"vocab_size": true}', "meta.json: vocab_size is True"),
        ('{"vocab_size": 2147483648}', "expected a positive integer up to 2147483647"),
        (f'{{"vocab_size": {10**290}}}', f"meta.json: vocab_size is {10**290}, expected"),
    ],
)
def test_a_malformed_meta_file_is_reported(tmp_path: Path, text: str, sentence: str) -> None:
    np.arange(100, dtype=np.uint16).tofile(path := tmp_path / "corpus.bin")
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DataError, match=sentence):
        build(path)


def test_a_missing_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder .*nowhere") as caught:
        build(tmp_path / "nowhere")
    assert "train.bin and eval.bin" in str(caught.value)


def test_a_folder_with_nothing_to_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"x")
    with pytest.raises(
        DataError,
        match=r"holds neither train.bin, train.npy or train.txt nor any .txt, .py or .md files",
    ):
        build(tmp_path)


def test_an_empty_file_is_reported(tmp_path: Path) -> None:
    (path := tmp_path / "corpus.bin").touch()
    with pytest.raises(DataError, match=r"corpus.bin is empty"):
        build(path)


@pytest.mark.parametrize(("split", "count"), [("train", 95), ("eval", 5)])
def test_too_short_for_one_window_is_reported(tmp_path: Path, split: str, count: int) -> None:
    np.arange(100, dtype=np.uint16).tofile(path := tmp_path / "corpus.bin")
    with pytest.raises(
        DataError,
        match=f"corpus.bin is too short: its {split} part has {count} tokens, one sample needs 201",
    ):
        build(path, split=split, context=200)


def test_a_size_that_is_no_multiple_of_the_type_is_reported(tmp_path: Path) -> None:
    (path := tmp_path / "corpus.bin").write_bytes(b"x" * 101)
    with pytest.raises(
        DataError, match="has 101 bytes, which is not a whole number of uint32 tokens"
    ) as caught:
        build(path, token_type="uint32")
    assert "--data.token_type" in str(caught.value)


@pytest.mark.parametrize(
    ("array", "description"),
    [
        (np.zeros(100), r"float64 \[100\]"),
        (np.zeros((10, 10), dtype=np.int32), r"int32 \[10, 10\]"),
    ],
)
def test_an_npy_file_of_something_else_is_reported(
    tmp_path: Path, array: np.ndarray, description: str
) -> None:
    np.save(path := tmp_path / "corpus.npy", array)
    with pytest.raises(
        DataError,
        match=f"corpus.npy holds {description}: expected integers of this machine in one dimension",
    ):
        build(path)


def test_an_npy_file_that_is_none_or_holds_objects_is_reported(tmp_path: Path) -> None:
    (path := tmp_path / "corpus.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match=r"corpus.npy cannot be mapped as a .npy file"):
        build(path)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"corpus.npy cannot be mapped as a .npy file"):
        build(path)


def test_a_negative_token_is_reported(tmp_path: Path) -> None:
    np.save(path := tmp_path / "corpus.npy", np.array([1, 2, -7] * 20))
    with pytest.raises(
        DataError, match=r"corpus.npy holds the token -7: tokens are counted from 0"
    ):
        build(path)
