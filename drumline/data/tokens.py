"""Samples for a language model: windows of tokens from token files, from text, or from Python's own
source.

Single files are mapped into memory, not read: the ranks of a node share the pages that are used.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from drumline.base.errors import DataError
from drumline.base.untrusted import parse_json, read_regular
from drumline.data.dataset import Split, TwoPartDataset, gather_rows

_TEXT_VOCABULARY = 256  # a token of text is one byte
_MAX_VOCABULARY = (1 << 31) - 1
_TEXT_ENDINGS = (".txt", ".py", ".md")
_SPLIT_ENDINGS = (".bin", ".npy", ".txt")
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
_SCAN_CHUNK = 1 << 24
_EVALUATION_PART = 20  # without a file of its own, evaluation gets the last twentieth
_NEXT_STEP = (
    "give --data.dir (or DATASET_DIR) a .npy, .bin or text file, a folder with train.bin and eval.bin "
    "(or .npy, .txt), or a folder of .txt, .py or .md files"
)


class Tokens(NamedTuple):
    """One file or corpus: its tokens, the size of their vocabulary, and its name for errors."""

    values: NDArray[Any]
    vocab_size: int
    name: str
    is_stated: bool = False
    """Whether a meta.json states the vocabulary size: then a token may exceed it."""


def tokens(*, split: Split, dir: str | None, token_type: str, context: int) -> TokenWindows:
    """One part of a text or of a file of tokens; with no `dir`, of the Python standard library's
    source."""
    train, evaluation = find_tokens(dir, token_type=token_type)
    if evaluation is None:
        cut = len(train.values) - len(train.values) // _EVALUATION_PART
        part = slice(cut) if split == "train" else slice(cut, None)
        chosen = train._replace(values=train.values[part])
    else:
        # One vocabulary for both parts: the model is built from it.
        vocab_size = max(train.vocab_size, evaluation.vocab_size)
        tokens_of_split = train if split == "train" else evaluation
        chosen = tokens_of_split._replace(vocab_size=vocab_size)

    if len(chosen.values) <= context:
        raise DataError(
            f"{chosen.name} is too short: its {split} part has {len(chosen.values)} tokens, one sample needs "
            f"{context + 1}",
            next_step="use more text, or set --model.context lower",
        )
    return TokenWindows(chosen, context=context)


class TokenWindows(TwoPartDataset):
    """Windows of `context` + 1 tokens: all but the last are inputs, all but the first are targets.
    They are copied to the device in the type they are stored in, and widened there."""

    def __init__(self, tokens: Tokens, *, context: int) -> None:
        window = context + 1
        kind = tokens.values.dtype
        length = len(tokens.values) // window
        self.vocab_size = tokens.vocab_size
        self._name = tokens.name
        rows = np.asarray(tokens.values)[: length * window].reshape(length, window)

        # The same bits as signed integers: torch has few operations for the wider unsigned types.
        self._rows = rows.view(f"i{kind.itemsize}") if kind.itemsize > 1 else rows
        self._kind = kind
        self._torch_kind = torch.from_numpy(np.empty(0, dtype=kind)).dtype

        # A meta.json may be wrong, and the error of a GPU would not explain it.
        self._may_exceed = tokens.is_stated and np.iinfo(kind).max >= self.vocab_size

    def __len__(self) -> int:
        return len(self._rows)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
        rows = gather_rows(self._rows, indices, pinned=pinned)
        if self._may_exceed:
            values = rows.numpy().view(self._kind)
            strays = values[(values < 0) | (values >= self.vocab_size)]
            if len(strays):
                raise DataError(
                    f"{self._name} holds the token {strays[0]}, but its vocabulary has {self.vocab_size}",
                    next_step="correct vocab_size in meta.json, or remove the file to have it counted",
                )

        return rows

    def finish(self, rows: Tensor, choices: None) -> tuple[Tensor, Tensor]:
        return inputs_and_targets(rows.view(self._torch_kind))


def inputs_and_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens of each window but the last, and all but the first, as int64."""
    count, window = rows.shape

    # A view of both, so that they are widened and laid out in one copy.
    pair = rows.as_strided((2, count, window - 1), (rows.stride(1), *rows.stride()))
    widened = pair.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
    inputs, targets = widened.unbind()

    return inputs, targets


def find_tokens(dir: str | None, *, token_type: str) -> tuple[Tokens, Tokens | None]:
    """The tokens to train on, and those to evaluate on; None: a part of the former."""
    if dir is None:
        return standard_library(), None

    path = Path(dir)
    if path.is_file():
        return _open(path, token_type), None
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}", next_step=_NEXT_STEP)

    train = _named(path, "train")
    evaluation = _named(path, "eval") or _named(path, "val")
    if train is not None and evaluation is not None:
        return _open(train, token_type), _open(evaluation, token_type)
    if train is not None:
        return _open(train, token_type), None

    files = [file for file in path.rglob("*") if file.suffix in _TEXT_ENDINGS]
    texts = sorted(file for file in files if file.is_file())
    if not texts:
        raise DataError(
            f"{path} holds neither train.bin, train.npy or train.txt nor any .txt, .py or .md files",
            next_step=_NEXT_STEP,
        )
    return _joined(texts, name=str(path)), None


def standard_library() -> Tokens:
    """The source of Python's standard library, without its tests: about 11 MB that every machine
    has. It differs between versions of Python; ranks compare what they have before the first
    step."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for path, subfolders, names in os.walk(folder):
        # not walked: site-packages may be large
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        files += [Path(path, name) for name in names if name.endswith(".py")]

    files.sort(key=lambda path: path.relative_to(folder).parts)
    return _joined(files, name="the Python standard library")


def _joined(paths: Iterable[Path], *, name: str) -> Tokens:
    # In memory: many small files cannot be mapped as one. A corpus that is too large for memory
    # should be one file.
    text = b"".join(path.read_bytes() for path in paths)
    return Tokens(np.frombuffer(text, dtype=np.uint8), _TEXT_VOCABULARY, name)


def _named(folder: Path, name: str) -> Path | None:
    paths = (folder / f"{name}{ending}" for ending in _SPLIT_ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _open(path: Path, token_type: str) -> Tokens:
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty", next_step="write the file again")

    if path.suffix == ".npy":
        values = _map_npy(path)
    elif path.suffix == ".bin":
        values = _map_raw(path, np.dtype(token_type))
    else:
        return Tokens(_map_raw(path, np.dtype(np.uint8)), _TEXT_VOCABULARY, str(path))

    vocab_size, is_stated = _vocabulary(values, path)
    return Tokens(values, vocab_size, str(path), is_stated)


def _map_raw(path: Path, kind: np.dtype[Any]) -> NDArray[Any]:
    size = path.stat().st_size
    if size % kind.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is not a whole number of {kind} tokens",
            next_step="set --data.token_type to the type the file was written with, or write it again",
        )
    return np.memmap(path, dtype=kind, mode="r")


def _map_npy(path: Path) -> NDArray[Any]:
    try:
        values: NDArray[Any] = open_memmap(path, mode="r")
    # A damaged header may raise anything: its shape may have any numbers.
    except Exception as error:
        raise DataError(
            f"{path} cannot be mapped as a .npy file ({error})",
            next_step="write it with numpy.save(path, tokens)",
        ) from error

    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.dtype.isnative:
        raise DataError(
            f"{path} holds {values.dtype} {list(values.shape)}: expected integers of this machine in one dimension",
            next_step="save the tokens as one array of an integer type",
        )
    return values


def _vocabulary(values: NDArray[Any], path: Path) -> tuple[int, bool]:
    """How many different tokens there are, and whether a meta.json beside the file states it as
    `vocab_size`."""
    stated = _stated_vocabulary(path.with_name("meta.json"))
    if stated is not None:
        return stated, True

    # Reads the whole file once on each rank: about a second per gigabyte, if the disk is as fast.
    highest = -1
    for start in range(0, len(values), _SCAN_CHUNK):
        piece = values[start : start + _SCAN_CHUNK]
        highest = max(highest, int(piece.max()))
        lowest = int(piece.min())
        if lowest < 0:
            raise DataError(
                f"{path} holds the token {lowest}: tokens are counted from 0",
                next_step="write it again",
            )

    return highest + 1, False


def _stated_vocabulary(meta: Path) -> int | None:
    """The `vocab_size` in that file; None: there is no file, or it does not have one."""
    if not meta.is_file():
        return None

    try:
        stated = parse_json(read_regular(meta, follow_links=True)).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{meta} cannot be read as a JSON object ({error})",
            next_step="correct or remove it",
        ) from error

    if stated is None or (type(stated) is int and 0 < stated <= _MAX_VOCABULARY):
        return stated

    raise DataError(
        f"{meta}: vocab_size is {stated!r}, expected a positive integer up to {_MAX_VOCABULARY}",
        next_step="correct it",
    )
