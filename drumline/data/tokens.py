"""Samples for a language model: token windows that do not overlap, split into inputs and targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.dataset import Split, TwoPartDataset, gather_rows
from drumline.data.token_files import Tokens, find_tokens
from drumline.errors import DataError

_EVALUATION_PART = 20  # without a file of its own, evaluation gets the last twentieth


def inputs_and_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens of each window but the last, and all but the first, as int64."""
    count, window = rows.shape
    # A view of both, so that they are widened and laid out in one copy.
    both = rows.as_strided((2, count, window - 1), (rows.stride(1), *rows.stride()))
    inputs, targets = both.to(torch.int64, copy=True, memory_format=torch.contiguous_format).unbind()
    return inputs, targets


class TokenWindows(TwoPartDataset):
    """Windows of `context` + 1 tokens: all but the last are inputs, all but the first are targets. They are copied to
    the device in the type they are stored in, and widened there."""

    def __init__(self, tokens: Tokens, *, start: int, stop: int, context: int) -> None:
        self.vocab_size = tokens.vocab_size
        self._name = tokens.name
        self._is_stated = tokens.is_stated
        self._start = start
        self._window = context + 1
        self._length = (stop - start) // self._window
        self._attach(tokens.values)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
        rows = gather_rows(self._rows, indices, pinned=pinned)
        if self._may_exceed:
            self._check(rows.numpy().view(self._values.dtype.newbyteorder("=")))
        return rows

    def finish(self, rows: Tensor, choices: None) -> tuple[Tensor, Tensor]:
        return inputs_and_targets(rows.view(self._kind))

    def _attach(self, values: NDArray[Any]) -> None:
        stop, kind = self._start + self._length * self._window, values.dtype
        self._values = values
        rows = np.asarray(values)[self._start : stop].reshape(self._length, self._window)
        # Bit for bit as signed: torch has few operations for the wider unsigned types.
        self._rows = rows.view(f"{kind.byteorder}i{kind.itemsize}") if kind.itemsize > 1 else rows
        self._kind = torch.from_numpy(np.empty(0, dtype=kind.newbyteorder("="))).dtype
        # A meta.json may be wrong, and a GPU's error would not say so.
        self._may_exceed = self._is_stated and np.iinfo(kind).max >= self.vocab_size

    def _check(self, rows: NDArray[Any]) -> None:
        if rows.max() < self.vocab_size and (rows.dtype.kind == "u" or rows.min() >= 0):
            return
        stray = rows[(rows < 0) | (rows >= self.vocab_size)][0]
        raise DataError(
            f"{self._name} holds the token {stray}, but its vocabulary has {self.vocab_size}",
            next_step="correct vocab_size in meta.json, or remove the file to have it counted",
        )

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes that are spawned: a mapped file is mapped again there, not copied."""
        state = {name: value for name, value in vars(self).items() if name not in ("_rows", "_values")}
        values = self._values
        if isinstance(values, np.memmap):
            return {**state, "mapped": (values.filename, values.dtype, values.offset, values.shape)}
        return {**state, "held": values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held, mapped = state.pop("held", None), state.pop("mapped", None)
        vars(self).update(state)
        if mapped is not None:
            path, kind, offset, shape = mapped
            held = np.memmap(path, dtype=kind, mode="r", offset=offset, shape=shape)
        self._attach(held)


def tokens(*, split: Split, dir: str | None, token_type: str, context: int) -> TokenWindows:
    """One part of a text or of a file of tokens; with no `dir`, of the Python standard library's source."""
    train, evaluation = find_tokens(dir, token_type=token_type)
    chosen, start, stop = train, 0, len(train.values)
    if evaluation is None:
        cut = stop - stop // _EVALUATION_PART
        start, stop = (0, cut) if split == "train" else (cut, stop)
    else:
        # One vocabulary for both parts: the model is built from it.
        vocab_size = max(train.vocab_size, evaluation.vocab_size)
        chosen = (train if split == "train" else evaluation)._replace(vocab_size=vocab_size)
        stop = len(chosen.values)
    if stop - start < context + 1:
        raise DataError(
            f"{chosen.name} is too short: its {split} part has {stop - start} tokens, one sample needs {context + 1}",
            next_step="use more text, or set --model.context lower",
        )
    return TokenWindows(chosen, start=start, stop=stop, context=context)
