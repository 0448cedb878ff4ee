"""What decides the bits of a result: seeds and random states, kernels, threads and the machine.

A run has one seed. Initial weights are the same on every rank; random numbers inside the model
(dropout) differ by rank, or in the elastic mode by shard; those of a sample depend only on the
sample (data/sharding.py), on any rank.
"""

from __future__ import annotations

import platform
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.base.errors import CheckpointError, TrainingError, UsageError

# One number for each use of the seed, so that no two draw the same numbers.
MODEL_SEEDS = 1
RANK_SEEDS = 2
SHARD_SEEDS = 3
RNG_BYTES = 12 * 1024
_RNG_VERSION = 1
_RNG_HEADER = struct.Struct("<8sI4I")  # a mark, the version, the length of each part
_RNG_MARK = b"drum-rng"

# key, position, whether a normal draw is waiting, that draw
_NUMPY = struct.Struct("<624IiId")
_GPU_BYTES = 16  # seed and offset
_TORCH = struct.Struct("<QiiQ")  # seed, left, seeded, next; then the table

# key and position, whether a normal draw is waiting, that draw
_PYTHON = struct.Struct("<625I?d")
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""The variable that cuBLAS needs before its first use, to give the same bits each time."""


def seed_shared(seed: int) -> None:
    """Seed all generators the same way on every rank: what is built next is the same on all."""
    _seed_generators(np.random.SeedSequence([seed, MODEL_SEEDS]))


def seed_rank(seed: int, rank: int) -> None:
    """Seed all generators differently on every rank."""
    _seed_generators(np.random.SeedSequence([seed, RANK_SEEDS, rank]))


def seed_shard(seed: int, *, epoch: int, start: int, shard: int) -> None:
    """Seed all generators for one shard of the global batch that starts there: the next random
    numbers are the same on any rank that computes it."""
    _seed_generators(np.random.SeedSequence([seed, SHARD_SEEDS, epoch, start, shard]))


def _seed_generators(sequence: np.random.SeedSequence) -> None:
    """Seed torch, Python and numpy with independent numbers."""
    torch_seed, python_seed, numpy_seed = (
        int(word) for word in sequence.generate_state(3, np.uint64)
    )
    torch.manual_seed(torch_seed & (2**63 - 1))
    random.seed(python_seed)
    np.random.seed(numpy_seed & 0xFFFFFFFF)


# The random state of one rank is one flat tensor of fixed length, so that ranks gather it with a
# plain collective. It holds the four global generators that a model or a user's code may draw from:
# torch's on the CPU and on this rank's GPU, numpy's and Python's.


def capture_rng(device: torch.device) -> Tensor:
    """The random state of this process as `RNG_BYTES` bytes on the CPU; `restore_rng` continues
    with the same draws."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        raise UsageError(
            "numpy's global generator was replaced (np.random.set_bit_generator), so its state is not one that "
            "is saved",
            next_step="leave it as it is, and draw from a np.random.Generator of your own",
        )

    on_gpu = _to_bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else b""

    _, key, gauss = random.getstate()
    python_state = _PYTHON.pack(*key, gauss is not None, gauss or 0.0)

    numpy_global: Any = np.random.get_state()
    _, numpy_key, *rest = numpy_global
    numpy_state = _NUMPY.pack(*numpy_key.tolist(), *rest)

    parts = (_to_bytes(torch.get_rng_state()), on_gpu, numpy_state, python_state)
    packed = _RNG_HEADER.pack(_RNG_MARK, _RNG_VERSION, *map(len, parts)) + b"".join(parts)
    return _to_tensor(packed.ljust(RNG_BYTES, b"\0"))


def restore_rng(state: Tensor, device: torch.device) -> None:
    """Continue with the same draws as the process that captured it; a GPU's state is ignored
    without a GPU."""
    try:
        on_cpu, on_gpu, numpy_state, python_state = check_rng(state)
    except ValueError as error:
        what = f"the saved random state is corrupt: {error}"
        raise CheckpointError(what, next_step="use an earlier checkpoint") from error

    torch.set_rng_state(_to_tensor(on_cpu))
    if on_gpu and device.type == "cuda":
        torch.cuda.set_rng_state(_to_tensor(on_gpu), device)

    *key, position, has_gauss, gauss = _NUMPY.unpack(numpy_state)
    inner = {"key": np.array(key, dtype=np.uint32), "pos": position}
    np.random.set_state(
        {"bit_generator": "MT19937", "state": inner, "has_gauss": has_gauss, "gauss": gauss}
    )

    *key, has_gauss, gauss = _PYTHON.unpack(python_state)
    random.setstate((3, tuple(key), gauss if has_gauss else None))


@contextmanager
def keeping_rng(device: torch.device) -> Iterator[None]:
    """Random numbers that are drawn here do not change those of the caller."""
    before = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(before, device)


def check_rng(state: Tensor) -> list[bytes]:
    """The four parts of a state; ValueError if it is corrupt: with a wrong position numpy and torch
    would read beyond their tables."""
    packed = _to_bytes(state.cpu()) if state.dtype is torch.uint8 else b""
    if len(packed) < _RNG_HEADER.size or not packed.startswith(_RNG_MARK):
        raise ValueError(f"it is no random state ({len(packed)} bytes)")

    _, version, *lengths = _RNG_HEADER.unpack_from(packed)
    if version != _RNG_VERSION:
        raise ValueError(
            f"it is a random state of another version of Drumline (format {version}, expected {_RNG_VERSION})"
        )

    torch_bytes = torch.get_rng_state().numel()
    if lengths not in [[torch_bytes, size, _NUMPY.size, _PYTHON.size] for size in (0, _GPU_BYTES)]:
        raise ValueError(f"it is no random state of this version of torch ({len(packed)} bytes)")
    if len(packed) != RNG_BYTES:
        raise ValueError(f"it has {len(packed)} bytes, expected {RNG_BYTES}")

    ends = accumulate(lengths, initial=_RNG_HEADER.size)
    parts = [packed[start:end] for start, end in pairwise(ends)]

    _, left, seeded, following = _TORCH.unpack_from(parts[0])

    # `left` numbers of the table are unused, from `following` on; (1, 0) is a generator that was
    # just seeded.
    is_inside = 0 < left <= 624 and following == 625 - left
    is_torch_valid = seeded and (is_inside or (left, following) == (1, 0))

    *_, numpy_position, has_gauss, _ = _NUMPY.unpack(parts[2])
    *_, python_position, _, _ = _PYTHON.unpack(parts[3])
    are_inside = 0 <= numpy_position <= 624 and 0 <= python_position <= 624
    if not (is_torch_valid and are_inside and has_gauss in (0, 1)):
        raise ValueError("a position is outside its table")
    return parts


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _to_tensor(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


# Kernels, threads and the machine


def use_deterministic_kernels() -> None:
    """Let torch use only kernels that give the same bits each time, and refuse operations that have
    none."""
    torch.use_deterministic_algorithms(True)

    # The search for the fastest kernel measures times, so it does not choose the same one each
    # time.
    torch.backends.cudnn.benchmark = False

    # A debugging aid that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explain_refused_kernels() -> Iterator[None]:
    """Adds what to do when torch refuses an operation that has no deterministic kernel."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise

        raise TrainingError(
            f"{str(error).split(',', 1)[0]} on this device, and only deterministic ones are allowed here",
            next_step="use another operation, or leave --train.deterministic (and --train.exact elastic) "
            "off: then a resumed run may differ in the last bits",
        ) from error


def platform_facts(device: torch.device) -> dict[str, Any]:
    """What the last bit of a result depends on. On another machine a run may differ by rounding."""
    if device.type == "cuda":
        hardware: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device),
            "CUDA version": torch.version.cuda,
        }
    else:
        hardware = {
            "device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "number of threads": torch.get_num_threads(),
        }
    return {"torch version": torch.__version__, **hardware}
