"""The shuffled order of an epoch, without a list of it: the sample index at any position is computed on its own.

Ranks and DataLoader workers compute only the indices of their own batch. A dataset of a billion samples costs three
megabytes and a few milliseconds per epoch, not eight gigabytes and minutes.

How: positions 0 to length - 1 are laid out on a grid of about sqrt(length) rows and columns. A Feistel round adds to
the row a random number that depends on the column (modulo the number of rows), the next round the other way round;
each is a bijection of the grid. The grid has up to sqrt(length) cells too many; a position that lands on one goes
through again until it lands inside ("cycle walking"), which makes it a bijection of the positions alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.data.draws import Draws

# Pairs of rounds, one for the row and one for the column. As few as make every order of five samples about equally
# likely (chi-square over 24,000 seeds; five pairs fail it). A pair costs a batch about five microseconds.
_ROUND_PAIRS = 6


class _Grid(NamedTuple):
    # Arrays of no dimension: of a number numpy would make one in each round.
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    row_shifts: NDArray[np.int64]
    """[pair, column]: what is added to the row."""
    column_shifts: NDArray[np.int64]
    """[pair, row]: what is added to the column."""


def permute(positions: NDArray[np.int64], *, length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The sample indices at these positions of the epoch's order: a bijection of [0, length)."""
    return _walk(_shuffle, positions, length, seed, epoch)


def invert(indices: NDArray[np.int64], *, length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The positions of these samples in the epoch's order: the inverse of `permute`."""
    return _walk(_unshuffle, indices, length, seed, epoch)


def _walk(
    move: Callable[[NDArray[np.int64], _Grid], NDArray[np.int64]],
    cells: NDArray[np.int64],
    length: int,
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    """Move each cell until it lands inside."""
    if cells.size == 0:
        return cells.copy()
    grid = _grid(length, seed, epoch)
    moved = move(cells, grid)
    while moved.max() >= length:
        outside = moved >= length
        moved[outside] = move(moved[outside], grid)
    return moved


def _shuffle(cells: NDArray[np.int64], grid: _Grid) -> NDArray[np.int64]:
    row, column = np.divmod(cells, grid.columns)
    for row_shift, column_shift in zip(grid.row_shifts, grid.column_shifts, strict=True):
        row += row_shift[column]
        row %= grid.rows
        column += column_shift[row]
        column %= grid.columns
    row *= grid.columns
    row += column
    return row


def _unshuffle(cells: NDArray[np.int64], grid: _Grid) -> NDArray[np.int64]:
    """The rounds of `_shuffle` in reverse, each undone by subtracting what it added."""
    row, column = np.divmod(cells, grid.columns)
    for row_shift, column_shift in zip(grid.row_shifts[::-1], grid.column_shifts[::-1], strict=True):
        column -= column_shift[row]
        column %= grid.columns
        row -= row_shift[column]
        row %= grid.rows
    row *= grid.columns
    row += column
    return row


@lru_cache(maxsize=4)
def _grid(length: int, seed: int, epoch: int) -> _Grid:
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    draws = Draws(seed, epoch, np.arange(_ROUND_PAIRS, dtype=np.int64))
    return _Grid(
        rows=np.array(rows),
        columns=np.array(columns),
        row_shifts=(draws.uniform(columns, stream=1) * rows).astype(np.int64),
        column_shifts=(draws.uniform(rows, stream=2) * columns).astype(np.int64),
    )
