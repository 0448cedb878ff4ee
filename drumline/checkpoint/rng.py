"""The random state of one rank as one flat tensor of fixed length, so that ranks gather it with a plain collective.

It holds the four global generators that a model or a user's code may draw from: torch's on the CPU and on this rank's
GPU, numpy's and Python's. The next draws after `restore_rng` are those that would have followed `capture_rng`.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import torch
from torch import Tensor

from drumline.errors import CheckpointError

RNG_BYTES = 12 * 1024
_VERSION = 1
_HEADER = struct.Struct("<8sI4I")  # a mark, the version, the length of each part
_MARK = b"drum-rng"
_NUMPY = struct.Struct("<624IiId")  # key, position, whether a normal draw is waiting, that draw
_TORCH_BYTES = 5056  # of all versions so far
_GPU_BYTES = 16  # seed and offset
_TORCH = struct.Struct("<QiiQ")  # seed, left, seeded, next; then the table
_PYTHON = struct.Struct("<625I?d")  # key and position, whether a normal draw is waiting, that draw


def capture_rng(device: torch.device) -> Tensor:
    """The random state of this process as `RNG_BYTES` bytes on the CPU."""
    on_gpu = _to_bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else b""
    _, key, gauss = random.getstate()
    python_state = _PYTHON.pack(*key, gauss is not None, gauss or 0.0)
    parts = (_to_bytes(torch.get_rng_state()), on_gpu, _numpy_state(), python_state)
    packed = _HEADER.pack(_MARK, _VERSION, *map(len, parts)) + b"".join(parts)
    return _to_tensor(packed.ljust(RNG_BYTES, b"\0"))


def restore_rng(state: Tensor, device: torch.device) -> None:
    """Continue the draws of the process that captured; a GPU's state is ignored where there is no GPU."""
    on_cpu, on_gpu, numpy_state, python_state = check_rng(state)
    torch.set_rng_state(_to_tensor(on_cpu))
    if on_gpu and device.type == "cuda":
        torch.cuda.set_rng_state(_to_tensor(on_gpu), device)
    *key, position, has_gauss, gauss = _NUMPY.unpack(numpy_state)
    inner = {"key": np.array(key, dtype=np.uint32), "pos": position}
    np.random.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": has_gauss, "gauss": gauss})
    *key, has_gauss, gauss = _PYTHON.unpack(python_state)
    random.setstate((3, tuple(key), gauss if has_gauss else None))


class CorruptRandomStateError(CheckpointError):
    """A saved random state that no generator can have; `reason` is what is wrong."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the saved random state is corrupt: {reason}", next_step="use an earlier checkpoint")
        self.reason = reason


def check_rng(state: Tensor) -> list[bytes]:
    """The four parts of a state; an error if it is corrupt. With a wrong position numpy and torch would read behind
    their tables."""
    packed = _to_bytes(state.cpu()) if state.dtype is torch.uint8 else b""
    if len(packed) != RNG_BYTES or not packed.startswith(_MARK):
        raise CorruptRandomStateError(f"it is no random state ({state.nbytes} bytes)")
    _, version, *lengths = _HEADER.unpack_from(packed)
    if version != _VERSION:
        raise CorruptRandomStateError(f"its version is {version}, expected {_VERSION}")
    offset, parts = _HEADER.size, []
    for length in lengths:
        parts.append(packed[offset : offset + length])
        offset += length
    on_gpu = _GPU_BYTES if lengths[1] else 0
    expected = [torch.get_rng_state().numel(), on_gpu, _NUMPY.size, _PYTHON.size]
    if lengths != expected or offset > RNG_BYTES:
        raise CorruptRandomStateError(f"its parts have {lengths} bytes, expected {expected}")
    if lengths[0] == _TORCH_BYTES:
        _, left, seeded, following = _TORCH.unpack_from(parts[0])
        # Of the table `left` numbers are unused, from `following` on; (1, 0) is a generator that has just been seeded.
        if not seeded or ((left, following) != (1, 0) and not (0 < left <= 624 and following == 625 - left)):
            raise CorruptRandomStateError(f"torch's position is {following}, with {left} numbers left")
    *_, numpy_position, has_gauss, _ = _NUMPY.unpack(parts[2])
    *_, python_position, _, _ = _PYTHON.unpack(parts[3])
    for whose, position in (("numpy", numpy_position), ("Python", python_position)):
        if not 0 <= position <= 624:
            raise CorruptRandomStateError(f"{whose}'s position is {position}, expected 0 to 624")
    if has_gauss not in (0, 1):
        raise CorruptRandomStateError(f"numpy's has_gauss is {has_gauss}, expected 0 or 1")
    return parts


def _numpy_state() -> bytes:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is a {state['bit_generator']}, which cannot be saved",
            next_step="leave numpy's global generator as it is, and use a generator object of your own",
        )
    inner = state["state"]
    return _NUMPY.pack(*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"])


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _to_tensor(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
