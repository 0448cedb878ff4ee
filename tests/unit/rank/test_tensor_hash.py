"""The hash of tensors: a flipped bit is always found, and the same content gives the same number
wherever it lies."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drumline.rank import tensor_hash
from drumline.rank.tensor_hash import (
    CHUNK_BYTES,
    COLUMNS,
    ROW_BYTES,
    combine,
    hash_tensors,
    text_hash,
)

CPU = torch.device("cpu")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def one_hash(tensor: Tensor) -> int:
    return int(hash_tensors([tensor], CPU)[0])


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bytes as a tensor of this type; 0 and 1 for booleans."""
    with warnings.catch_warnings():
        # torch calls half-precision complex numbers an experiment
        warnings.simplefilter("ignore")
        like = torch.zeros(shape, dtype=dtype)
        width = like.element_size()
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (like.numel() * width,), dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5)])
def test_every_flipped_bit_is_found_and_each_gives_another_number(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = made(shape, dtype)
    raw = tensor.reshape(-1).view(torch.uint8)
    variants = [tensor]
    for byte in range(len(raw)):
        for bit in range(1 if dtype is torch.bool else 8):
            flipped = raw.clone()
            flipped[byte] ^= 1 << bit
            variants.append(flipped.view(dtype).reshape(shape))
    hashes = hash_tensors(variants, CPU).tolist()
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_content_gives_the_same_number_however_it_lies(dtype: torch.dtype) -> None:
    tensor = made((6, 9), dtype)
    shifted = torch.empty(1 + tensor.numel(), dtype=dtype)[1:].view(6, 9).copy_(tensor)
    spread = torch.empty((6, 18), dtype=dtype)[:, ::2].copy_(tensor)
    assert not spread.is_contiguous()
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert {one_hash(view) for view in (tensor, tensor.clone(), shifted, spread, transposed)} == {
        one_hash(tensor)
    }
    assert one_hash(tensor.t()) != one_hash(tensor)


def test_an_element_that_was_cut_from_a_column_has_its_bytes() -> None:
    column = made((2, 3), torch.float32)[:1, -1]
    assert column.is_contiguous()
    assert column.stride() != (1,)
    assert one_hash(column) == one_hash(column.new_tensor([column.item()]))


def test_a_conjugate_that_torch_has_not_computed_yet_is_hashed_as_what_it_is() -> None:
    tensor = made((5,), torch.complex64)
    assert (
        one_hash(tensor.conj())
        == one_hash(tensor.conj().clone().resolve_conj())
        != one_hash(tensor)
    )
    assert one_hash(tensor.conj().imag) == one_hash(-tensor.imag)


def test_type_and_shape_count() -> None:
    zeros = [
        torch.zeros(8),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros(9),
        torch.zeros(2, 4),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(()),
        torch.zeros(1),
    ]
    assert len(set(hash_tensors(zeros, CPU).tolist())) == len(zeros)


def test_no_tensors_give_no_numbers() -> None:
    assert hash_tensors([], CPU).tolist() == []
    assert hash_tensors([], CPU).dtype == torch.int64


def test_a_tensors_number_does_not_depend_on_its_company() -> None:
    tensors = [
        torch.randn(5000),
        torch.zeros(0),
        torch.randn(3, 3).half(),
        torch.randn(2 * COLUMNS),
    ]
    assert hash_tensors(tensors, CPU).tolist() == [one_hash(tensor) for tensor in tensors]


def swap(tensor: Tensor, left: int, right: int) -> Tensor:
    order = torch.arange(tensor.numel())
    order[left], order[right] = right, left
    return tensor[order]


@pytest.mark.parametrize("column", [1, 2, COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS])
def test_swapped_elements_are_found(column: int) -> None:
    tensor = torch.randn(3 * COLUMNS)
    assert one_hash(swap(tensor, 0, column)) != one_hash(tensor)


def test_swapped_tensors_are_found() -> None:
    left = torch.randn(9)
    right = torch.randn(9)
    in_order = hash_tensors([left, right], CPU)
    swapped = hash_tensors([right, left], CPU)
    assert in_order.tolist() == swapped.tolist()[::-1]
    names = ["left", "right"]
    assert int(combine(in_order, names)) != int(combine(swapped, names))
    assert int(combine(in_order, names)) == int(combine(swapped, names[::-1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_many_changed_signs_do_not_cancel(dtype: torch.dtype) -> None:
    tensor = torch.randn(2 * COLUMNS, dtype=torch.float64).to(dtype)
    flips: list[Callable[[Tensor], Tensor]] = [
        torch.neg,
        lambda x: torch.cat([-x[:2], x[2:]]),
        lambda x: torch.cat([-x[:COLUMNS], x[COLUMNS:]]),
        lambda x: x * torch.tensor([-1, 1] * COLUMNS, dtype=dtype),
    ]
    assert len({one_hash(tensor), *(one_hash(flip(tensor)) for flip in flips)}) == 1 + len(flips)


@pytest.mark.parametrize("size", [ROW_BYTES, CHUNK_BYTES, CHUNK_BYTES + ROW_BYTES])
@pytest.mark.parametrize("extra", [-1, 0, 1, 3, 4])
def test_bits_around_the_end_of_a_row_and_of_a_chunk_are_found(size: int, extra: int) -> None:
    raw = torch.zeros(size + extra, dtype=torch.uint8)
    hashes = [one_hash(raw)]
    for byte in (0, ROW_BYTES - 2, size - ROW_BYTES, size - 2, size + extra - 1):
        raw[byte] ^= 128
        hashes.append(one_hash(raw))
        raw[byte] ^= 128
    assert len(set(hashes)) == len(set(hashes[1:])) + 1


def test_the_number_does_not_depend_on_the_size_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7 * COLUMNS + 3)
    whole = one_hash(tensor)
    monkeypatch.setattr(tensor_hash, "CHUNK_BYTES", 2 * ROW_BYTES)
    assert one_hash(tensor) == whole
    assert one_hash(torch.cat([torch.zeros(1), tensor])[1:]) == whole


def test_the_numbers_are_the_same_on_every_machine() -> None:
    """So that ranks on machines of other kinds can be compared."""
    assert one_hash(torch.arange(10_000, dtype=torch.int32)) == -8365287842662636827
    assert text_hash("drumline") == -6343790208015651323


def test_parameters_that_learn_can_be_hashed() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert one_hash(parameter) == one_hash(torch.ones(3))


def test_one_changed_hash_changes_the_whole() -> None:
    values = torch.zeros(6, dtype=torch.int64)
    names = list("abcdef")
    combined = {int(combine(values, names))}
    for place in range(6):
        for bit in range(63):
            values[place] = 1 << bit
            combined.add(int(combine(values, names)))
        values[place] = 0
    assert len(combined) == 1 + 6 * 63
