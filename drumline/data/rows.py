"""Collation by index: rows of an array become one tensor in a single copy, whether it is mapped or held in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def rows_of(array: NDArray[Any], indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
    """The rows at these indices. `pinned`: in page-locked memory, of which torch keeps what was used before; it hands a
    block out again when the copy to the device that was made from it is done."""
    if not pinned:
        # Not array[indices], which may give an axis of size 1 another stride: kernels are chosen by strides.
        return _native(array.take(indices, axis=0))
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
        raise IndexError(f"rows from {indices.min()} to {indices.max()} of {len(array)}")
    kind = _native(np.empty(0, dtype=array.dtype)).dtype
    rows = torch.empty((len(indices), *array.shape[1:]), dtype=kind, pin_memory=True)
    # In any other mode numpy would copy everything once more; what it would look for was looked for above.
    np.take(array, indices, axis=0, out=rows.numpy(), mode="clip")
    return rows


def _native(rows: NDArray[Any]) -> Tensor:
    """As a tensor, in this machine's order of bytes."""
    return torch.from_numpy(rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("=")))
