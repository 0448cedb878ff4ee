"""On a GPU: tensors have the hash that they have on the CPU, and hashing waits for nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from drumline.rank.tensor_hash import CHUNK_BYTES, COLUMNS, combine, hash_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bytes as a tensor of this type, on the CPU; 0 and 1 for booleans."""
    like = torch.zeros(shape, dtype=dtype)
    raw = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (like.numel() * like.element_size(),),
        dtype=torch.uint8,
    )
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_and_a_cpu_get_the_same_number(dtype: torch.dtype) -> None:
    shapes = [(), (0,), (1,), (7,), (COLUMNS + 3,), (3, 5, 7), (CHUNK_BYTES + COLUMNS + 1,)]
    tensors = [made(shape, dtype) for shape in shapes]
    expected = hash_tensors(tensors, CPU).tolist()
    assert hash_tensors([tensor.to(GPU) for tensor in tensors], GPU).tolist() == expected
    # Some here and some there, and strides that only one of them has.
    mixed = [tensor.to(GPU) if number % 2 else tensor for number, tensor in enumerate(tensors)]
    assert hash_tensors(mixed, GPU).tolist() == expected
    assert hash_tensors(mixed, CPU).tolist() == expected
    assert hash_tensors([tensors[5].to(GPU).mT.contiguous().mT], GPU).tolist() == expected[5:6]


def test_it_does_with_deterministic_algorithms_too() -> None:
    tensors = [made((3 * COLUMNS + 5,), torch.float32), made((9,), torch.float16)]
    torch.use_deterministic_algorithms(True)
    try:
        hashes = hash_tensors([tensor.to(GPU) for tensor in tensors], GPU).tolist()
    finally:
        torch.use_deterministic_algorithms(False)
    assert hashes == hash_tensors(tensors, CPU).tolist()


def test_a_flipped_bit_is_found_on_the_gpu() -> None:
    tensor = torch.randn(3 * COLUMNS + 5, device=GPU)
    hashes = hash_tensors([tensor], GPU).tolist()
    for place in (0, 1, COLUMNS - 1, COLUMNS, 3 * COLUMNS + 4):
        for bit in (0, 23, 31):
            tensor.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            hashes += hash_tensors([tensor], GPU).tolist()
            tensor.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert len(set(hashes)) == 16


def test_hashing_does_not_wait_for_the_device() -> None:
    on_gpu = [made((3, 3, 64), torch.bfloat16).to(GPU), made((CHUNK_BYTES,), torch.float32).to(GPU)]
    # Odd bytes, other strides, nothing, and counters on the CPU, as optimizers have them.
    tensors = [*on_gpu, made((5,), torch.bool).to(GPU), on_gpu[0].mT, torch.zeros(0, device=GPU)]
    tensors += [torch.tensor(3.0), torch.tensor(4.0)]
    names = [str(number) for number in range(len(tensors))]
    expected = hash_tensors([tensor.cpu() for tensor in tensors], CPU)
    hash_tensors(tensors, GPU)  # the first call makes the table
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch says that it does not find every kind of waiting yet
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        hashes = hash_tensors(tensors, GPU)
        combined = combine(hashes, names)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hashes.tolist() == expected.tolist()
    assert combined.item() == combine(expected, names).item()
